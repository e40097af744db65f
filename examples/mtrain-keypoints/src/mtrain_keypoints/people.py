"""People: boxes in images, with the points in each. The form of a split, which readers of data sets return.

Shape letters: N people, K points of a person.
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
class People:
    """The people of one split."""

    images: "Sequence[Path] | NDArray[np.uint8]"
    """(N,) files, which are decoded when they are needed, or (N, H, W, 3) RGB."""
    boxes: NDArray[np.float64]
    """(N, 4) left, top, width and height in pixels of the image."""
    points: NDArray[np.float64]
    """(N, K, 3) x and y in pixels of the image, and 1 where the point is known, else 0."""
    class_names: tuple[str, ...]
    """(K,) names of the points."""
    keys: Sequence[str]
    """(N,) name of each person's image, the same on every host; `data.split` divides by it."""
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.boxes)

    def image(self, index: int) -> NDArray[np.uint8]:
        """Return the image of a person, uint8 (H, W, 3) RGB.

        Raises:
            DataError: it cannot be read, or has more than `max_pixels`.
        """
        from mtrain.data.images.decode import decode  # imported here so that printing a plan needs no image library

        image = self.images[index]
        return decode(image, max_pixels=self.max_pixels) if isinstance(image, Path) else image

    def name(self, index: int) -> str:
        """Return a name of the person for messages."""
        return f"{self.keys[index]}, person {index}"

    def chosen(self, indices: Sequence[int]) -> "People":
        """Return the people with these numbers, in that order."""
        rows = list(indices)
        images = self.images[rows] if isinstance(self.images, np.ndarray) else [self.images[i] for i in rows]
        keys = [self.keys[index] for index in rows]
        return replace(self, images=images, boxes=self.boxes[rows], points=self.points[rows], keys=keys)


def mirrored(names: Sequence[str]) -> list[int]:
    """Return for each point the number of the one that it becomes in a mirror: `left_eye` becomes `right_eye`."""
    other = [_mirror_name(name) for name in names]
    return [names.index(name) if name in names else number for number, name in enumerate(other)]


def _mirror_name(name: str) -> str:
    if "left" in name:
        return name.replace("left", "right")
    return name.replace("right", "left")


def divided(split: People, share: float, *, seed: int) -> tuple[People, People]:
    """Divide a split by a hash of its images' names: all people of an image are in the same part.

    Raises:
        DataError: there are fewer than two images.
    """
    names = sorted(set(split.keys), key=lambda key: hashlib.sha256(f"{seed}\0{key}".encode()).digest())
    if len(names) < 2:
        raise DataError(f"data.split: {len(names)} images cannot be divided; give more, or leave it out")
    scored = set(names[: min(max(round(share * len(names)), 1), len(names) - 1)])
    parts: tuple[list[int], list[int]] = ([], [])
    for index, key in enumerate(split.keys):
        parts[key in scored].append(index)
    return split.chosen(parts[0]), split.chosen(parts[1])
