"""Translate training transforms of a PaddleDetection file: distortion, expansion, crop, flip, sides drawn per batch.

Also what evaluation shares: the list of transforms of a reader, and the normalisation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.spec.importers.key_report import Book, equal, is_number, show_value
from mtrain.spec.importers.paddledetection_network import is_plus
from mtrain.spec.importers.paddledetection_rtdetr import is_one as is_rtdetr
from mtrain.spec.yaml_reader import Path

INTERPOLATIONS = ("nearest", "linear", "cubic", "area", "lanczos4")
"""Interpolations by OpenCV's number."""
ALL_INTERPOLATIONS = ["nearest", "linear", "area", "cubic", "lanczos4"]
LETTERBOX_OFF = ("mosaic", "translate", "scale", "hsv_h", "hsv_s", "hsv_v", "flip_ud")
"""Augmentations that are on by default in mtrain and missing in PaddleDetection's PP-YOLOE."""
_SPAN = [0.5, 1.5]
"""PaddleDetection's default range of saturation, contrast and brightness."""
_HALF = 0.5
"""PaddleDetection's default of every probability."""
_DONE = ("Decode", "Permute", "PadGT", "NormalizeBox", "BboxXYXY2XYWH")
_PROBABILITY = "mtrain draws it for every image; of its steps each has a chance of its own"


def translate(book: Book) -> None:
    """Enter the transforms of TrainReader; those that it does not name are off."""
    if not book.has("TrainReader"):
        book.note("data.augment: the file has no TrainReader, so training has no augmentation")
    for name in LETTERBOX_OFF:
        # Without these, mtrain's own defaults would add augmentation that the file does not have.
        book.assume(f"data.augment.{name}", 0.0, "not among PaddleDetection's transforms")
    translators = {
        "RandomDistort": _distort,
        "RandomExpand": _expand,
        "RandomCrop": _crop,
        "RandomFlip": _flip,
        "BatchRandomResize": _sizes,
        "NormalizeImage": normalisation,
    }
    for part in ("sample_transforms", "batch_transforms"):
        for at, name in transforms(book, ("TrainReader", part)):
            if name in translators:
                translators[name](book, at)
            elif name in _DONE:
                book.same(at, "as always in mtrain")
            elif name == "Resize":
                book.drop(at, "crops and boxes are shares of the image, and BatchRandomResize sets the side")
            else:
                book.drop(at, "mtrain has no such transform")
    book.otherwise("data.augment.flip_lr", 0.0, "no RandomFlip in TrainReader")
    book.otherwise("data.resize", "stretch", "PaddleDetection's PP-YOLOE")


def _distort(book: Book, at: Path) -> None:
    target = "data.augment.distort"
    ranges = {key: book.get((*at, key), [*_SPAN, _HALF]) for key in ("saturation", "contrast", "brightness")}
    ranges["hue"] = book.get((*at, "hue"), [-18, 18, _HALF])
    for key, value in ranges.items():
        if not _is_list_of_numbers(value) or len(value) != 3:
            raise book.refuse((*at, key), "expected [smallest, largest, chance of no change]")
    chance = ranges["brightness"][2]
    book.put(f"{target}.probability", 1.0 - chance, at)
    for key, value in ranges.items():
        translated = _degrees(value) if key == "hue" else value[:2]
        book.put(f"{target}.{key}", translated, (*at, key))
        if value[2] != chance:
            book.drop(
                (*at, key), f"mtrain has one chance for all four steps: brightness's {show_value(chance)} is taken"
            )
        if key == "hue" and value[0] != -value[1]:
            book.drop((*at, key), f"mtrain's hue turns equally far both ways: {translated:g} degrees are taken")
        book.same((*at, key), f"{target}.{key}: {show_value(translated)}")
    book.note(
        "data.augment.distort: as in PaddleDetection until September 2023, with which PP-YOLOE was published; "
        f"for its distortion since then: -o {target}.form=enhance {target}.hue={_pillow_degrees(ranges['hue']):g}"
    )
    _options(book, at, {"random_apply": True, "count": 4, "random_channel": False}, what="mtrain's distortion")
    book.drop((*at, "prob"), _PROBABILITY)
    book.bare(at, target)


def _pillow_degrees(hue: Sequence[float]) -> float:
    """Return the hue's range in degrees where it counts 256ths of Pillow's circle."""
    # Beyond half a turn both ways, every hue is reached already.
    return min(360.0 / 256 * max(abs(hue[0]), abs(hue[1])), 180.0)


def _degrees(hue: Sequence[float]) -> float:
    """Return the hue's range in degrees. The angle counts half turns until September 2023, so +-18 is every angle."""
    return min(180.0 * max(abs(hue[0]), abs(hue[1])), 180.0)


def _expand(book: Book, at: Path) -> None:
    target = "data.augment.expand"
    # Their chance is that of no change.
    chance, remark = book.number((*at, "prob"), _HALF), f"{target}.probability (theirs is the chance of no change)"
    book.settle((*at, "prob"), f"{target}.probability", 1.0 - chance, remark=remark)
    book.settle((*at, "ratio"), f"{target}.ratio", book.number((*at, "ratio"), 4.0))
    fill = book.get((*at, "fill_value"), 127.5)
    book.settle((*at, "fill_value"), f"{target}.fill", fill if isinstance(fill, list) else [fill] * 3)
    book.bare(at, target)


def _crop(book: Book, at: Path) -> None:
    target = "data.augment.crop"
    defaults: Mapping[str, Any] = {
        "thresholds": [0.0, 0.1, 0.3, 0.5, 0.7, 0.9],
        "allow_no_crop": True,
        "scaling": [0.3, 1.0],
        "aspect_ratio": [0.5, 2.0],
        "num_attempts": 50,
    }
    for key, value in defaults.items():
        book.settle((*at, key), f"{target}.{key}", book.get((*at, key), value))
    _options(book, at, {"cover_all_box": False, "is_mask_crop": False, "ioumode": "iou"}, what="mtrain's crop")
    book.drop((*at, "prob"), _PROBABILITY)
    book.bare(at, target)


def _flip(book: Book, at: Path) -> None:
    book.settle((*at, "prob"), "data.augment.flip_lr", book.get((*at, "prob"), _HALF))
    book.bare(at, "data.augment.flip_lr")


def _sizes(book: Book, at: Path) -> None:
    sizes = book.get((*at, "target_size"))
    if book.truth((*at, "random_size"), default=True):
        book.carry((*at, "target_size"), "data.augment.sizes", remark="one for each update, on all ranks")
    else:
        side = square(sizes)
        if side is None:
            raise book.refuse((*at, "target_size"), "expected one side in pixels or two equal ones")
        book.carry((*at, "target_size"), "data.augment.sizes", [side])
    book.same((*at, "random_size"), "data.augment.sizes")
    if book.truth((*at, "random_interp"), default=False):
        names = ALL_INTERPOLATIONS
        book.drop((*at, "interp"), "random_interp is true, and counts")
    else:
        number = book.integer((*at, "interp"), 0)
        if not 0 <= number < len(INTERPOLATIONS):
            raise book.refuse((*at, "interp"), f"expected OpenCV's number of one of {', '.join(INTERPOLATIONS)}")
        names = [INTERPOLATIONS[number]]
        book.same((*at, "interp"), f"data.augment.interpolations: {show_value(names)}")
    target = "data.augment.interpolations"
    book.settle((*at, "random_interp"), target, names, remark=f"{target}: {show_value(names)}")
    if equal(book.get((*at, "keep_ratio")), other=False):
        book.same((*at, "keep_ratio"), "data.resize: stretch")
    book.drop((*at, "keep_ratio"), "mtrain's pre-processing of PP-YOLOE stretches images to a square")


def _options(book: Book, at: Path, fixed: Mapping[str, Any], *, what: str) -> None:
    for key, value in fixed.items():
        book.expect_fixed((*at, key), value, what=what)


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


MEAN_STD: Mapping[str, Any] = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "is_scale": True,
    "norm_type": "mean_std",
}
"""Normalisation of images, which is part of mtrain's PP-YOLOE."""
SCALE_ALONE: Mapping[str, Any] = {
    "mean": [0.0, 0.0, 0.0],
    "std": [1.0, 1.0, 1.0],
    "is_scale": True,
    "norm_type": "none",
}
"""That of PP-YOLOE+: pixels are divided by 255, and no more."""


def normalisation(book: Book, at: Path) -> None:
    """Enter a NormalizeImage, which must be the model's own.

    Raises: ``SpecError`` for another normalisation: weights and metrics would differ from those of the file.
    """
    is_plain = is_rtdetr(book) or is_plus(book)
    name = "RT-DETR" if is_rtdetr(book) else "PP-YOLOE+" if is_plain else "PP-YOLOE"
    expected = SCALE_ALONE if is_plain else MEAN_STD
    if is_plain and not book.has((*at, "norm_type")):
        raise book.refuse(at, f"without norm_type, whose default is mean_std; mtrain's {name} has norm_type: none")
    for key in book.section(at):
        if key not in expected:
            continue
        if not equal(book.get((*at, key)), expected[key]):
            raise book.refuse(
                (*at, key),
                f"expected {show_value(expected[key])}: mtrain's {name} normalises images so, and has no other way",
            )
        book.same((*at, key), f"always so in mtrain's {name}")


def square(size: Any) -> int | None:
    """Return the side of a square given as one number or two; None for anything else."""
    sides: Sequence[Any] = size if isinstance(size, list) else [size]
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    return sides[0] if whole and len(sides) in (1, 2) and sides[0] == sides[-1] else None


def transforms(book: Book, path: Path) -> list[tuple[Path, str]]:
    """Return (path, name) of each transform in a reader's list of one-key mappings.

    Raises: ``SpecError`` if the value is no such list.
    """
    entries = book.get(path)
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(item, dict) and len(item) == 1 for item in entries):
        raise book.refuse(path, "expected a list such as [Decode: {}, RandomFlip: {}]")
    return [((*path, position, name), name) for position, item in enumerate(entries) for name in item]
