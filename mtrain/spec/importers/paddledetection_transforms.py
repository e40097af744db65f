"""Read the list of transforms of a PaddleDetection reader, and the transforms that evaluation and training share."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.spec.importers.key_report import Book, equal, show_value
from mtrain.spec.importers.paddledetection_network import is_plus
from mtrain.spec.yaml_reader import Path

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
    name, expected = ("PP-YOLOE+", SCALE_ALONE) if is_plus(book) else ("PP-YOLOE", MEAN_STD)
    if is_plus(book) and not book.has((*at, "norm_type")):
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
