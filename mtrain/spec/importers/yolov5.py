"""Translate YOLOv5's ``model.yaml``, ``hyp.yaml`` and ``data.yaml``, any of them, to a spec.

Settings that are flags of its training script, and that no file states, take that script's defaults; the spec says so.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mtrain.errors import SpecError
from mtrain.spec.importers.documents import Document
from mtrain.spec.importers.importer import Importer, refuse_file, sections
from mtrain.spec.importers.key_report import Book, equal, show_value
from mtrain.spec.importers.options import Options
from mtrain.spec.yaml_reader import Path

KINDS: Mapping[str, Sequence[str]] = {
    "model": ("backbone", "head"),
    "hyper-parameters": ("lr0",),
    "data": ("names", "nc"),  # `train` and `val` are keys of a spec too
}
"""Keys that identify each kind of file: one is enough, and the first kind that fits counts."""
PARTS: Mapping[str, str] = {
    "model": "its name is enough: mtrain --cfg {file} --data DATA.yaml",
    "hyper-parameters": "mtrain config import MODEL.yaml {file} DATA.yaml --to spec.yml, then mtrain -c spec.yml",
    "data": "say the recipe too: mtrain --data {file} --cfg yolov5s.yaml",
}
"""What to type where one kind of file is given in the place of a spec."""
EPOCHS = 300
IMAGE_SIZE = 640
NOMINAL_BATCH = 64
MOST_CLASSES = 10_000
"""Largest number of classes accepted from a file without names."""
_SCRIPT = "YOLOv5's training script"
_FLAG = f"{_SCRIPT} has it as a flag; this is its default"

PLAIN = {
    "lr0": "optimizer.learning_rate",
    "momentum": "optimizer.momentum",
    "weight_decay": "optimizer.weight_decay",
    "lrf": "schedule.final_factor",
    "warmup_epochs": "schedule.warmup.epochs",
    "warmup_momentum": "schedule.warmup.momentum_from",
    "mosaic": "data.augment.mosaic",
    "mixup": "data.augment.mixup",
    "degrees": "data.augment.degrees",
    "translate": "data.augment.translate",
    "scale": "data.augment.scale",
    "shear": "data.augment.shear",
    "perspective": "data.augment.perspective",
    "hsv_h": "data.augment.hsv_h",
    "hsv_s": "data.augment.hsv_s",
    "hsv_v": "data.augment.hsv_v",
    "flipud": "data.augment.flip_ud",
    "fliplr": "data.augment.flip_lr",
}
"""Path in the spec by hyper-parameter."""
OPTIONS = {
    "box": "box",
    "cls": "cls",
    "obj": "obj",
    "cls_pw": "cls_pw",
    "obj_pw": "obj_pw",
    "anchor_t": "anchor_threshold",
    "fl_gamma": "fl_gamma",
    "label_smoothing": "label_smoothing",
}
"""Option of the model by hyper-parameter."""
RULES: Mapping[str, Any] = {
    "optimizer.rule": "sgd",
    "optimizer.nesterov": True,
    "train.learning_rate_scaling": "yolov5",
    "train.clip_norm": 10.0,
    "train.ema.rule": "ramp",
    "train.ema.decay": 0.9999,
    "train.ema.ramp": 2000.0,
    "schedule.name": "linear",
    "schedule.per": "epoch",
    "schedule.warmup.updates": 100,
    "schedule.warmup.learning_rate_from": 0.0,
}
"""Settings that YOLOv5's training script always has, or has unless a flag changes them."""


class YOLOv5(Importer):
    """YOLOv5's model, hyp and data YAML, any of them."""

    expected: ClassVar[str] = "YOLOv5's model (`backbone`), hyp (`lr0`) or data (`names`) YAML"

    def recognises(self, documents: Sequence[Document]) -> bool:
        """Return whether one of the files is one of the three."""
        return any(_kind_of(document) is not None for document in documents)

    def lacking(self, document: Document) -> str:
        """See ``Importer.lacking``: each of the three files is a part."""
        kind = str(_kind_of(document))
        return f"the {kind} YAML of a training of YOLOv5, and no recipe; {PARTS[kind].format(file=document.name)}"

    def translate(self, documents: Sequence[Document], *, cards: int | None) -> Sequence[Book]:
        """Translate up to three files, one of each kind; they state no batch per card, so ``cards`` must be None."""
        by_kind: dict[str, Document] = {}
        for document in documents:
            kind = _kind_of(document)
            if kind is None:
                raise refuse_file(document, self.expected)
            if kind in by_kind:
                raise SpecError(
                    f"{document.name}: {by_kind[kind].name} is a {kind} YAML of YOLOv5 too; give one of them"
                )
            by_kind[kind] = document
        if cards is not None:
            raise SpecError(
                f"--cards {cards}: {documents[0].name} is YOLOv5's, which states no batch per card; leave it out"
            )
        return translate({kind: by_kind[kind] for kind in KINDS if kind in by_kind})


def _kind_of(document: Document) -> str | None:
    """Return which of the three files a document is; None: none of them."""
    # A spec of mtrain has keys such as ``train`` and ``data`` too, and must not be taken for a data YAML.
    if sections(document):
        return None
    return next((kind for kind, keys in KINDS.items() if any(key in document.values for key in keys)), None)


def translate(documents: Mapping[str, Document]) -> list[Book]:
    """Translate the files, given by kind, and return their books.

    Raises: ``SpecError`` if a file describes something that mtrain does not have.
    """
    books = {kind: Book(document) for kind, document in documents.items()}
    variant = _network(books["model"]) if "model" in books else None
    first = next(iter(books.values()))
    if variant is None:
        first.note(
            "model.name: no model YAML is given, so mtrain's default stands; -o model.name=yolov5s says otherwise"
        )
    if "hyper-parameters" in books:
        _hyper_parameters(books["hyper-parameters"], Options(f"yolov5{variant or 'n'}"))
    if "data" in books:
        _data(books["data"])
    _agree(books)
    for book in books.values():
        book.close()
    return list(books.values())


def _network(book: Book) -> str:
    mismatch = layout_difference(book.get("backbone"), book.get("head"))
    if mismatch:
        source: str | Path = "head" if mismatch.startswith("head") else "backbone"
        raise book.refuse(source, f"which is not the layout of YOLOv5 6.0, the one that mtrain has: {mismatch}")
    depth, width = book.number("depth_multiple", -1), book.number("width_multiple", -1)
    variant = VARIANTS.get((depth, width))
    if variant is None:
        variants = ", ".join(f"{name} {pair[0]} x {pair[1]}" for pair, name in VARIANTS.items())
        source = "depth_multiple" if book.has("depth_multiple") else "width_multiple"
        raise book.refuse(source, f"with width_multiple {width}: no variant of YOLOv5; expected one of {variants}")
    for key, expected in (("activation", "nn.SiLU()"), ("ch", 3)):
        if book.has(key) and not equal(book.get(key), expected):
            raise book.refuse(key, f"expected {expected}: mtrain's YOLOv5 has no other")
        book.same(key, "always so in mtrain's YOLOv5")
    name = f"yolov5{variant}"
    book.carry("depth_multiple", "model.name", name, remark=f"with width_multiple: {show_value(width)}")
    book.same("width_multiple", f"model.name: {name} (with depth_multiple)")
    for key in ("backbone", "head"):
        book.same(key, f"model.name: {name} (the layout of release 6.0)")
    book.drop("nc", "the classes are those of the data")
    _anchors(book)
    return variant


def _anchors(book: Book) -> None:
    anchors = book.get("anchors")
    if isinstance(anchors, int) and not isinstance(anchors, bool):
        if anchors == 3:
            book.carry("anchors", "model.options.anchors", "auto", remark="three a level, computed from the data")
        else:
            book.drop("anchors", "mtrain's YOLOv5 has three anchors a level")
        return
    try:
        levels = [[[level[i], level[i + 1]] for i in range(0, len(level), 2)] for level in anchors or ()]
    except (TypeError, IndexError, KeyError):
        raise book.refuse("anchors", "expected three lists of width, height, width, ... in pixels") from None
    if equal(levels, ANCHORS_PX):
        book.same("anchors", "mtrain's default of model.options.anchors")
    else:
        book.carry("anchors", "model.options.anchors", levels)


def _hyper_parameters(book: Book, options: Options) -> None:
    for key, target in PLAIN.items():
        book.carry(key, target)
    for key, name in OPTIONS.items():
        options.carry(book, key, name)
    _groups(book)
    if equal(book.get("copy_paste"), 0):
        book.same("copy_paste", "off, as always in mtrain")
    book.drop("copy_paste", "mtrain has no outlines of objects to copy")
    book.drop("iou_t", "YOLOv5's own training does not use it")
    if book.has("anchors"):
        if round(book.number("anchors", 0)) == 3:
            book.carry("anchors", "model.options.anchors", "auto", remark="three a level, computed from the data")
        book.drop("anchors", "mtrain's YOLOv5 has three anchors a level")
    for target, value in RULES.items():
        book.assume(target, value, _SCRIPT)
    # Flags of the training script, which no file states.
    book.assume("train.epochs", EPOCHS, _FLAG)
    book.assume("data.image_size", IMAGE_SIZE, _FLAG)
    book.assume(
        "train.batch_size", NOMINAL_BATCH, "YOLOv5 gathers gradients up to its nominal batch where --batch is smaller"
    )
    book.assume("train.reference_batch_size", NOMINAL_BATCH, "the batch that weight_decay is meant for")


def _groups(book: Book) -> None:
    """Enter YOLOv5's three groups: no decay on biases and BatchNorm weights, and biases start the warm-up high."""
    bias: dict[str, Any] = {"match": r"\.bias$", "weight_decay": 0.0}
    source = _SCRIPT
    if book.has("warmup_bias_lr"):
        bias["warmup_from"] = book.get("warmup_bias_lr")
        source = f"{book.where('warmup_bias_lr')}, and {_SCRIPT}"
        book.same("warmup_bias_lr", f"optimizer.groups.0.warmup_from: {show_value(bias['warmup_from'])}")
    groups = [bias, {"match": r"\.bn\d*\.weight$", "weight_decay": 0.0}, {"match": ""}]
    book.assume("optimizer.groups", groups, source)


_CLASSIFICATION = re.compile(
    r"(get_)?(imagenet\d*|imagenette[\d-]*|imagewoof[\d-]*|cifar-?\d+|(fashion-)?mnist|caltech\d+)(\.\w+)?",
    re.IGNORECASE,
)
"""Names of YOLOv5's data sets for classification; their YAMLs have the same keys as those for detection."""


def _refuse_classification(book: Book) -> None:
    for key in ("path", "download"):
        words = re.split(r"[\s/\\]+", str(book.get(key) or ""))
        name = next((word for word in words if _CLASSIFICATION.fullmatch(word)), None)
        if name is not None:
            raise book.refuse(
                key,
                "which is a data set for classification (a folder of images for each class): it has no boxes, so no "
                "detector can be trained on it, and mtrain has no data.format that reads it",
            )


def _data(book: Book) -> None:
    _refuse_classification(book)
    book.assume("data.format", "yolo", f"{book.document.name} is a data YAML of YOLOv5")
    if book.has("path"):
        book.carry("path", "data.root")
        # YOLOv5 takes it from its own folder, and no file says where that is.
        if not str(book.get("path")).startswith("/"):
            book.note("data.root: YOLOv5 takes a relative `path` from its own folder, mtrain from where it is started")
    else:
        book.assume("data.root", ".", "no `path` is given; train and val are taken from where mtrain is started")
    if isinstance(book.get("train"), list) or isinstance(book.get("val"), list):
        description = str(book.document.path)
        book.put("data.options.description", description, "train")
        for key in ("train", "val"):
            book.same(key, f"data.options.description: {show_value(description)} (a list of folders is read there)")
    book.carry("train", "data.train")
    book.carry("val", "data.val")
    if book.get("test") is None:
        book.same("test", "none")
    book.drop("test", "mtrain trains on train and scores on val; -o data.val=... scores another split")
    book.drop("download", "mtrain downloads nothing; fetch the data set yourself")
    _names(book)


def _names(book: Book) -> None:
    class_names, count = book.get("names"), book.get("nc")
    if isinstance(class_names, dict):
        if sorted(class_names) != sorted(map(str, range(len(class_names)))):
            raise book.refuse("names", f"expected the keys 0 to {len(class_names) - 1}, each once")
        class_names = [class_names[str(label)] for label in range(len(class_names))]
    if class_names is None and book.has("nc"):
        if not 0 < book.integer("nc", 0) <= MOST_CLASSES:
            raise book.refuse("nc", f"expected 1 to {MOST_CLASSES} classes")
        numbered_names = [f"class{label}" for label in range(book.integer("nc", 0))]
        book.carry("nc", "data.names", numbered_names, remark="YOLOv5's names where none are given")
        return
    if class_names is None:
        return
    if not isinstance(class_names, list) or any(isinstance(name, dict | list) for name in class_names):
        raise book.refuse("names", "expected a list of class names")
    if book.has("nc") and not equal(count, len(class_names)):
        raise book.refuse("nc", f"but {len(class_names)} names are listed; correct one of them")
    book.carry("names", "data.names", [str(name) for name in class_names])
    book.same("nc", "the number of names")


def _agree(books: Mapping[str, Book]) -> None:
    """Note when the model YAML and the data YAML state different numbers of classes, as YOLOv5 does."""
    if "model" in books and "data" in books:
        model_count, data_names = books["model"].get("nc"), books["data"].values.get("data.names")
        if data_names is not None and not equal(model_count, len(data_names.value)):
            books["model"].note(
                f"{books['model'].where('nc')}: {show_value(model_count)}: the data has {len(data_names.value)} classes, "
                "and counts"
            )


# The arrangement is that of release 6.0 (https://github.com/ultralytics/yolov5/releases/tag/v6.0), rows of
# ``[from, number, module, arguments]``; the variants differ in two multipliers only.
VARIANTS = {(0.33, 0.25): "n", (0.33, 0.50): "s", (0.67, 0.75): "m", (1.0, 1.0): "l", (1.33, 1.25): "x"}
"""Variant by (depth_multiple, width_multiple)."""
ANCHORS_PX = (
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
"""(width, height) in pixels of the anchors in the published files, by level."""
_UP = (-1, 1, "nn.Upsample", (None, 2, "nearest"))


def _conv(channels: int, kernel: int, *rest: int) -> tuple[Any, ...]:
    return (-1, 1, "Conv", (channels, kernel, *rest))


def _join(layer: int) -> tuple[Any, ...]:
    return ((-1, layer), 1, "Concat", (1,))


def _merge(channels: int) -> tuple[Any, ...]:
    return (-1, 3, "C3", (channels, False))


def _stage(repeats: int, channels: int) -> tuple[Any, ...]:
    return (-1, repeats, "C3", (channels,))


LAYERS: Sequence[Sequence[Any]] = (
    *(_conv(64, 6, 2, 2), _conv(128, 3, 2), _stage(3, 128), _conv(256, 3, 2), _stage(6, 256)),
    *(_conv(512, 3, 2), _stage(9, 512), _conv(1024, 3, 2), _stage(3, 1024), (-1, 1, "SPPF", (1024, 5))),
    *(_conv(512, 1, 1), _UP, _join(6), _merge(512), _conv(256, 1, 1), _UP, _join(4), _merge(256)),
    *(_conv(256, 3, 2), _join(14), _merge(512), _conv(512, 3, 2), _join(10), _merge(1024)),
    ((17, 20, 23), 1, "Detect", ("nc", "anchors")),
)
BACKBONE_LAYERS = 10
"""Number of layers in `backbone`; the others are in `head`."""


def layout_difference(backbone: Any, head: Any) -> str:
    """Describe the first layout_difference from this network; empty if there is none."""
    for name, rows, expected in (
        ("backbone", backbone, LAYERS[:BACKBONE_LAYERS]),
        ("head", head, LAYERS[BACKBONE_LAYERS:]),
    ):
        if not isinstance(rows, list):
            return f"{name} is {show_value(rows)}, expected a list of layers"
        for position, (row, expected_row) in enumerate(zip(rows, expected, strict=False)):
            if not equal(_plain(row), expected_row):
                return f"{name} layer {position} is {show_value(row)}, expected {show_value(expected_row)}"
        if len(rows) != len(expected):
            return f"{name} has {len(rows)} layers, expected {len(expected)}"
    return ""


def _plain(row: Any) -> Any:
    """Convert a row's text ``None``, which Python wrote into these files, to null."""
    if isinstance(row, list):
        return [_plain(item) for item in row]
    return None if row == "None" else row
