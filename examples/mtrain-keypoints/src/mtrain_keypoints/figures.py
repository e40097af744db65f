"""Figures: boxes in pictures, with the points in each. The form of a split, which readers of data sets return.

Shape letters: N figures, K points of a figure.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.header import MAX_PIXELS
from mtrain.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """The figures of one split."""

    pictures: "Sequence[Path] | NDArray[np.uint8]"
    """(N,) files, which are decoded when they are needed, or (N, H, W, 3) RGB."""
    boxes: NDArray[np.float64]
    """(N, 4) left, top, width and height in pixels of the picture."""
    points: NDArray[np.float64]
    """(N, K, 3) x and y in pixels of the picture, and 1 where the point is known, else 0."""
    class_names: tuple[str, ...]
    """(K,) names of the points."""
    keys: Sequence[str]
    """(N,) name of each figure's picture, the same on every host; `data.split` divides by it."""
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.boxes)

    def picture(self, index: int) -> NDArray[np.uint8]:
        """Return the picture of a figure, uint8 (H, W, 3) RGB.

        Raises:
            DataError: it cannot be read, or has more than `max_pixels`.
        """
        from mtrain.data.images.decode import decode  # imported here so that printing a plan needs no image library

        picture = self.pictures[index]
        return decode(picture, max_pixels=self.max_pixels) if isinstance(picture, Path) else picture

    def name(self, index: int) -> str:
        """Return a name of the figure for messages."""
        return f"{self.keys[index]}, figure {index}"

    def chosen(self, indices: Sequence[int]) -> "Figures":
        """Return the figures with these numbers, in that order."""
        rows = list(indices)
        pictures = self.pictures[rows] if isinstance(self.pictures, np.ndarray) else [self.pictures[i] for i in rows]
        keys = [self.keys[index] for index in rows]
        return replace(self, pictures=pictures, boxes=self.boxes[rows], points=self.points[rows], keys=keys)


def mirrored(names: Sequence[str]) -> list[int]:
    """Return for each point the number of the one that it becomes in a mirror: `left_eye` becomes `right_eye`."""
    other = [_mirror_name(name) for name in names]
    return [names.index(name) if name in names else number for number, name in enumerate(other)]


def _mirror_name(name: str) -> str:
    if "left" in name:
        return name.replace("left", "right")
    return name.replace("right", "left")


def divided(split: Figures, share: float, *, seed: int) -> tuple[Figures, Figures]:
    """Divide a split by a hash of its pictures' names: all figures of a picture are in the same part.

    Raises:
        DataError: there are fewer than two pictures.
    """
    names = sorted(set(split.keys), key=lambda key: hashlib.sha256(f"{seed}\0{key}".encode()).digest())
    if len(names) < 2:
        raise DataError(f"data.split: {len(names)} pictures cannot be divided; give more, or leave it out")
    scored = set(names[: min(max(round(share * len(names)), 1), len(names) - 1)])
    parts: tuple[list[int], list[int]] = ([], [])
    for index, key in enumerate(split.keys):
        parts[key in scored].append(index)
    return split.chosen(parts[0]), split.chosen(parts[1])
