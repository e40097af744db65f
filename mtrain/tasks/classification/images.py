"""Images of a split that are read and decoded when they are needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.decode import decode_bytes
from mtrain.data.images.drawing import spread
from mtrain.data.images.header import MAX_PIXELS, ImageError, probe_bytes, read_image, reason_of
from mtrain.data.reading import listed
from mtrain.data.texts import Texts
from mtrain.errors import DataError
from mtrain.tasks.classification.labels import LabelledImages

LOOKED_AT = 200
"""Number of images whose size is looked at for a description."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImages:
    """Images that are decoded at each access. Implements ``Images``."""

    paths: Sequence[Path | str]
    max_pixels: int = MAX_PIXELS

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """Decode an image as it is displayed: (H, W, 3) RGB.

        Raises:
            DataError: it is missing, unreadable, truncated, or has more than ``max_pixels``; it is named.
        """
        if not 0 <= index < len(self):  # numpy and ``iter`` find the end of a sequence by this
            raise IndexError(index)
        return decode_bytes(self._content(index), self.paths[index], max_pixels=self.max_pixels)

    def size(self, index: int) -> tuple[int, int]:
        """Return width and height as displayed; nothing is decompressed.

        Raises:
            DataError: it is missing, truncated or no image, or has more than ``max_pixels``; it is named.
        """
        width, height = probe_bytes(self._content(index), self.paths[index])
        if width * height > self.max_pixels:
            raise ImageError(
                self.paths[index],
                f"{width} x {height} pixels are more than data.max_pixels ({self.max_pixels}) allows; make the image "
                "smaller, or raise it",
            )
        return width, height

    def choose(self, indices: Sequence[int]) -> "EncodedImages":
        """Return the images with these numbers, in that order."""
        return replace(self, paths=Texts.of(str(self.paths[index]) for index in indices))

    def _content(self, index: int) -> bytes:
        try:
            return read_image(self.paths[index])
        except OSError as error:
            raise ImageError(self.paths[index], f"{reason_of(error)}; expected an image") from error


def limit_pixels(split: LabelledImages, *, max_pixels: int) -> LabelledImages:
    """Return a split that refuses images of more than ``max_pixels`` when they are decoded."""
    if not isinstance(split.images, EncodedImages):
        return split
    return replace(split, images=replace(split.images, max_pixels=max_pixels))


def verify(*splits: LabelledImages) -> int:
    """Check that every encoded image is there and whole; return the number of images.

    Raises:
        DataError: some fail; the first 20 are named with the reason, the rest counted.
    """
    problems, count = [], sum(map(len, splits))
    for split in splits:
        if isinstance(split.images, EncodedImages):
            for index in range(len(split)):
                try:
                    # Headers are parsed and end markers sought; decompressing every image would take far longer.
                    split.images.size(index)
                except DataError as error:
                    problems.append(str(error))
    if problems:
        raise DataError(
            f"{len(problems)} of {count} images cannot be used; replace or remove them:\n{listed(problems)}"
        )
    return count


def sizes(split: LabelledImages) -> str:
    """Describe the sizes of the images of a split; up to :data:`LOOKED_AT` of them are looked at."""
    if isinstance(split.images, EncodedImages):
        # Spread over the split, because the images of one class or of one source often have one size and lie together.
        chosen = spread(len(split), LOOKED_AT)
        found = sorted({split.images.size(index) for index in chosen}, key=lambda size: size[0] * size[1])
        suffix = f" ({len(chosen)} of {len(split)} looked at)" if len(chosen) < len(split) else ""
    else:
        # The images of an array all have one size.
        found, suffix = [split.images[0].shape[1::-1]], ""
    (width, height), (largest_width, largest_height) = found[0], found[-1]
    span = "" if len(found) == 1 else f" to {largest_width} x {largest_height}"
    return f"{width} x {height}{span} px{suffix}"
