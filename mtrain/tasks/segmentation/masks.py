"""Images with masks: the result of segmentation data sets and the input of the rest of that task."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtrain.data.classes import LEFT_OUT, ClassChoice
from mtrain.data.images.header import MAX_PIXELS, need_bounded, probe
from mtrain.data.images.indexed import IGNORED, read_indices
from mtrain.data.reading import divide, listed
from mtrain.errors import DataError

_MAX_THREADS = 4
"""Threads that check files; each holds one decoded mask."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedImages:
    """The images of one split with their masks, both read when they are needed."""

    images: Sequence[Path]
    masks: Sequence[Path]
    """Empty for images without labels."""
    class_names: tuple[str, ...]
    keys: Sequence[str] = ()
    """Name of each image within the data set, the same on every host; ``data.split`` divides by it."""
    max_pixels: int = MAX_PIXELS
    choice: ClassChoice | None = None
    """The classes that are learnt, of those that the files have; None: all of them."""

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> NDArray[np.uint8]:
        """Decode an image as it is displayed: (H, W, 3) RGB.

        Raises:
            DataError: it cannot be read, or has more than ``max_pixels``.
        """
        from mtrain.data.images.decode import decode  # imported here so that printing a plan needs no image library

        return decode(self.images[index], max_pixels=self.max_pixels)

    def size(self, index: int) -> tuple[int, int]:
        """Return width and height of an image as displayed; nothing is decompressed.

        Raises:
            DataError: it cannot be read, or has more than ``max_pixels``.
        """
        size_wh = probe(self.images[index])
        need_bounded(self.images[index], size_wh, max_pixels=self.max_pixels)
        return size_wh

    def mask(self, index: int, size_wh: tuple[int, int]) -> NDArray[np.uint8]:
        """Read the class of each pixel, uint8 (H, W); ``IGNORED`` where there is none.

        Args:
            index: Number of the image.
            size_wh: Width and height of the image.

        Raises:
            DataError: the mask cannot be read, has another size, or an index that is no class.
        """
        path = self.masks[index]
        mask = read_indices(path, max_pixels=self.max_pixels)
        height, width = mask.shape
        if (width, height) != size_wh:
            raise DataError(
                f"{path}: a mask of {width} x {height} pixels, but {self.images[index].name} has {size_wh[0]} x "
                f"{size_wh[1]}; give masks of the size of their images"
            )
        classes = len(self.class_names if self.choice is None else self.choice.known)
        found = np.bincount(mask.ravel(), minlength=256)[:IGNORED]
        unknown = np.flatnonzero(found[classes:]) + classes
        if len(unknown):
            raise DataError(
                f"{path}: class index {', '.join(map(str, unknown[:5]))} for {classes} classes; expected 0 to "
                f"{classes - 1}, or {IGNORED} where a pixel counts nowhere; name all classes with data.names"
            )
        if self.choice is None:
            return mask
        table = np.full(256, IGNORED, np.uint8)
        table[:classes] = np.where(self.choice.label_of == LEFT_OUT, IGNORED, self.choice.label_of)
        return table[mask]

    def with_classes(self, choice: ClassChoice) -> "MaskedImages":
        """Return the images with masks of some classes; pixels of the others count nowhere."""
        return replace(self, class_names=choice.names, choice=choice)

    def report(self) -> list[str]:
        """Return a sentence on the choice of classes, where one was made."""
        return [] if self.choice is None else [f"{self.choice.describe()}; pixels of classes left out count nowhere"]

    def choose(self, indices: Sequence[int]) -> "MaskedImages":
        """Return the images with these numbers, in that order."""
        return replace(
            self,
            images=[self.images[index] for index in indices],
            masks=[self.masks[index] for index in indices],
            keys=[self.keys[index] for index in indices],
        )

    def divide(self, share: float, *, seed: int) -> "tuple[MaskedImages, MaskedImages]":
        """Divide the split into a training part and an evaluation part with ``share`` of the images, at least one in each.

        The parts are the same on every host.

        Raises:
            DataError: there are fewer than two images.
        """
        if len(self) < 2:
            raise DataError(f"data.split: {len(self)} images cannot be divided; give more, or leave it out")
        train, evaluation = divide(self.keys, share, seed=seed)
        return self.choose(train), self.choose(evaluation)


def count_pixels(split: MaskedImages) -> NDArray[np.int64]:
    """Check every image and mask of a split, and return the number of pixels of each class and of ``IGNORED``, (C + 1).

    Of images headers are parsed and end markers sought; masks are decoded.

    Raises:
        DataError: some cannot be used; the first 20 are named with the reason, the rest counted.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        results = list(pool.map(lambda index: _counts(split, index), range(len(split))))
    problems = [result for result in results if isinstance(result, str)]
    if problems:
        raise DataError(
            f"{len(problems)} of {len(split)} images cannot be used; replace or remove them:\n{listed(problems)}"
        )
    totals = np.zeros(256, dtype=np.int64)
    for result in results:
        totals += np.asarray(result, dtype=np.int64)
    return np.append(totals[: len(split.class_names)], totals[IGNORED])


def _counts(split: MaskedImages, index: int) -> NDArray[np.int64] | str:
    """Return the number of pixels of each index, (256), or what is wrong with the image."""
    try:
        return np.bincount(split.mask(index, split.size(index)).ravel(), minlength=256)
    except DataError as error:
        return str(error)
