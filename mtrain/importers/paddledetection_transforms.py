"""How a reader of a PaddleDetection file lists its transforms, and what evaluation and training have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.importers.key_report import Book, equal, shown
from mtrain.spec.yaml_reader import Path

MEAN_STD: Mapping[str, Any] = {
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "is_scale": True,
    "norm_type": "mean_std",
}
"""Normalisation of the picture, which is part of mtrain's PP-YOLOE."""


def normalisation(book: Book, at: Path) -> None:
    """Enter a NormalizeImage, which must be the model's own.

    Raises: ``SpecError`` where pictures are normalised otherwise: weights and figures would not be those of the file.
    """
    for key in book.section(at):
        if key not in MEAN_STD:
            continue
        if not equal(book.get((*at, key)), MEAN_STD[key]):
            raise book.refuse(
                (*at, key),
                f"expected {shown(MEAN_STD[key])}: mtrain's PP-YOLOE normalises pictures so, and has no other way "
                "(PP-YOLOE+ gives them to the network without)",
            )
        book.same((*at, key), "always so in mtrain's PP-YOLOE")


def square(size: Any) -> int | None:
    """The side of a square given as one number or two; None where it is none."""
    sides: Sequence[Any] = size if isinstance(size, list) else [size]
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    return sides[0] if whole and len(sides) in (1, 2) and sides[0] == sides[-1] else None


def transforms(book: Book, path: Path) -> list[tuple[Path, str]]:
    """(path, name) of each transform of a reader's list of one-key mappings.

    Raises: ``SpecError`` where it is no such list.
    """
    given = book.get(path)
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) and len(item) == 1 for item in given):
        raise book.refuse(path, "expected a list such as [Decode: {}, RandomFlip: {}]")
    return [((*path, position, name), name) for position, item in enumerate(given) for name in item]
