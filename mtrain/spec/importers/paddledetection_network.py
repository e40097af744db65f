"""Translate the network of a PaddleDetection file, which must be PP-YOLOE.

PP-YOLOE and PP-YOLOE+ are architecture ``YOLOv3`` with backbone ``CSPResNet``, neck ``CustomCSPPAN`` and head ``PPYOLOEHead``. Keys
that shape the network must have mtrain's values; keys of the loss and the predictions become options, or are reported.
"""

from collections.abc import Mapping
from typing import Any

from mtrain.spec.importers.key_report import Book, equal, show_value
from mtrain.spec.importers.options import Options
from mtrain.spec.yaml_reader import Path

ARCHITECTURES = ("YOLOv3", "PPYOLOE")
"""Names of the architecture that lists the parts; PP-YOLOE's own files use the first."""
PARTS = {"backbone": "CSPResNet", "neck": "CustomCSPPAN", "yolo_head": "PPYOLOEHead"}
VARIANTS = {(0.33, 0.50): "s", (0.67, 0.75): "m", (1.0, 1.0): "l", (1.33, 1.25): "x"}
"""Variant by (depth_mult, width_mult)."""
SHAPE: Mapping[str, Mapping[str, Any]] = {
    "CSPResNet": {
        "layers": [3, 6, 6, 3],
        "channels": [64, 128, 256, 512, 1024],
        "act": "swish",
        "return_idx": [1, 2, 3],
        "use_large_stem": True,
        "use_alpha": True,
    },
    "CustomCSPPAN": {
        "out_channels": [768, 384, 192],
        "stage_num": 1,
        "block_num": 3,
        "act": "swish",
        "spp": True,
        "use_alpha": False,
        "drop_block": False,
    },
    "PPYOLOEHead": {
        "fpn_strides": [32, 16, 8],
        "grid_cell_scale": 5.0,
        "grid_cell_offset": 0.5,
        "reg_max": 16,
        "reg_range": [0, 17],
        "act": "swish",
        "use_shared_conv": True,
        "attn_conv": "convbn",
    },
}
"""Settings of the network; a file with other values describes another network."""
FACTORS = (("CSPResNet", "use_alpha"), ("CustomCSPPAN", "use_alpha"))
"""Keys of the learned factors in backbone and neck; those of the backbone are true of PP-YOLOE+ as published."""
PLAIN_IMAGES: Path = ("EvalReader", "sample_transforms")
"""Place of the normalisation: PP-YOLOE+ has images from 0 to 1, and PP-YOLOE has ImageNet's mean and deviation."""
STATED = ("CSPResNet.return_idx", "CSPResNet.use_large_stem", "CustomCSPPAN.out_channels", "CustomCSPPAN.spp")
"""Keys whose default in PaddleDetection gives another network: a file must state them."""
HEAD_OPTIONS = {
    "static_assigner_epoch": "static_assigner_epoch",
    "loss_weight.class": "cls",
    "loss_weight.iou": "iou",
    "loss_weight.dfl": "dfl",
    "nms.nms_top_k": "max_candidates",
    "nms.keep_top_k": "max_detections",
    "nms.score_threshold": "confidence",
    "nms.nms_threshold": "iou_threshold",
}
"""Option of the model by key of the head."""
ALL = 100_000
"""More candidates than PP-YOLOE has points, which PaddleDetection writes as -1."""
HEAD_DEFAULTS: Mapping[str, Any] = {
    "static_assigner_epoch": 4,
    "nms.nms_top_k": ALL,
    "nms.keep_top_k": 100,
    "nms.score_threshold": 0.05,
    "nms.nms_threshold": 0.5,
}
"""PaddleDetection's defaults of the head's keys where mtrain's option has another default."""
HEAD_FIXED: Mapping[str, Any] = {
    "use_varifocal_loss": True,
    "static_assigner.name": "ATSSAssigner",
    "static_assigner.topk": 9,
    "static_assigner.force_gt_matching": False,
    "static_assigner.eps": 1e-9,
    "assigner.name": "TaskAlignedAssigner",
    "assigner.topk": 13,
    "assigner.alpha": 1.0,
    "assigner.beta": 6.0,
    "assigner.eps": 1e-9,
    "assigner.is_close_gt": False,
    "nms.name": "MultiClassNMS",
    "nms.normalized": True,
    "nms.nms_eta": 1.0,
    "exclude_nms": False,
    "exclude_post_process": False,
    "sm_use": False,
}
"""Settings that mtrain's loss and predictions always have, by key of the head."""
_WHAT = "mtrain's PP-YOLOE"


def translate(book: Book) -> str:
    """Enter the network and return the model's name.

    Raises: ``SpecError`` for a network that mtrain does not have.
    """
    architecture = _architecture(book)
    model = _variant(book)
    # A default that gives another network would be taken silently, and published weights would not fit.
    for path in STATED:
        if not book.has(path):
            source: str | Path = path.partition(".")[0] if book.has(path.partition(".")[0]) else "architecture"
            raise book.refuse(source, f"without {path}, which {_WHAT} needs at {show_value(_shape(path))}")
    for section, expected in SHAPE.items():
        for key in book.section(section):
            is_choice = (section, key) in FACTORS and isinstance(book.get((section, key)), bool)
            if key in expected and not is_choice and not equal(book.get((section, key)), expected[key]):
                raise book.refuse((section, key), f"expected {show_value(expected[key])}: {_WHAT} has no other")
            if key in expected:
                book.same((section, key), f"model.name: {model}")
            elif section != "PPYOLOEHead":
                # An unknown key of the head can change the loss at most, and
                # is reported; one of the other parts may change the network.
                raise book.refuse((section, key), f"which {_WHAT} does not know; it could change the network")
    book.same("architecture", f"model.name: {model}")
    book.same((architecture,), f"model.name: {model}")
    in_backbone, in_neck = (book.get(path) is True for path in FACTORS)
    if in_neck and not in_backbone:
        raise book.refuse(FACTORS[1], "expected false: mtrain's PP-YOLOE has no factors in the neck alone")
    factors = "everywhere" if in_neck else "backbone" if in_backbone else "none"
    if factors != ("backbone" if is_plus(book) else "none"):
        book.put("model.options.factors", factors, FACTORS[in_neck])
    _head(book, Options(model))
    return model


def _architecture(book: Book) -> str:
    needed = "architecture YOLOv3 with " + ", ".join(f"{key}: {part}" for key, part in PARTS.items())
    architecture = book.get("architecture")
    if architecture is None:
        path = next(book.document.leaves())
        raise book.refuse(path, f"and no architecture; give the file that PaddleDetection trains with -c ({needed})")
    if architecture not in ARCHITECTURES:
        raise book.refuse("architecture", f"which mtrain does not have; it imports PP-YOLOE: {needed}")
    for key, value in book.section((architecture,)).items():
        if not equal(value, PARTS.get(key)) and value not in (None, False):
            raise book.refuse((architecture, key), f"which mtrain does not have; it imports PP-YOLOE: {needed}")
    for key in PARTS:
        if not book.get((architecture, key)):
            raise book.refuse("architecture", f"without {architecture}.{key}; mtrain imports PP-YOLOE: {needed}")
    return str(architecture)


def _variant(book: Book) -> str:
    depth, width = book.number("depth_mult", 1.0), book.number("width_mult", 1.0)
    variant = VARIANTS.get((depth, width))
    if variant is None:
        variants = ", ".join(f"{name} {pair[0]} x {pair[1]}" for pair, name in VARIANTS.items())
        source = "depth_mult" if book.has("depth_mult") else "width_mult"
        raise book.refuse(source, f"depth x width {depth} x {width}: no PP-YOLOE that mtrain has; expected {variants}")
    model = f"ppyoloe_plus_{variant}" if is_plus(book) else f"ppyoloe_{variant}"
    book.put("model.name", model, "depth_mult" if book.has("depth_mult") else "architecture")
    for key in ("depth_mult", "width_mult"):
        book.same(key, f"model.name: {model} ({depth} x {width})")
    return model


def _head(book: Book, options: Options) -> None:
    def of(key: str) -> Path:
        return ("PPYOLOEHead", *key.split("."))

    if book.integer(of("static_assigner_epoch"), 0) < 0:
        options.carry(book, of("static_assigner_epoch"), "static_assigner_epoch", value=0)
    for key in ("nms.nms_top_k", "nms.keep_top_k"):
        if book.integer(of(key), ALL) == -1:
            options.carry(book, of(key), HEAD_OPTIONS[key], value=ALL)
    for key, name in HEAD_OPTIONS.items():
        options.carry(book, of(key), name)
        if key in HEAD_DEFAULTS and not book.has(of(key)):
            book.assume(f"model.options.{name}", HEAD_DEFAULTS[key], "PaddleDetection's default")
    for key, value in HEAD_FIXED.items():
        book.expect_fixed(of(key), value, what=_WHAT)
    if equal(book.get("ema_black_list"), ["proj_conv.weight"]):
        book.same("ema_black_list", "the distances that it names are no weights in mtrain")


def _shape(path: str) -> Any:
    section, _, key = path.partition(".")
    return SHAPE[section][key]


def is_plus(book: Book) -> bool:
    """Return whether the file describes PP-YOLOE+: images from 0 to 1; where it does not say, factors in the backbone."""
    steps = book.get(PLAIN_IMAGES)
    for step in steps if isinstance(steps, list) else []:
        if isinstance(step, dict) and isinstance(step.get("NormalizeImage"), dict):
            return bool(step["NormalizeImage"].get("norm_type") == "none")
    return book.get(FACTORS[0]) is True
