"""Images whose pixels are class indices: read them, and write them with the palette of Pascal VOC."""

import io
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.header import (
    MAX_PIXELS,
    ImageError,
    need_bounded,
    open_image,
    read_image,
    reason_of,
    stored_size,
)
from mtrain.errors import DataError
from mtrain.spec import outputs

IGNORED = 255
"""Index of pixels that belong to no class and count nowhere."""
_MODES = ("P", "L", "1")
"""Pillow's names of the forms that hold one number of up to 8 bits a pixel."""


def read_indices(path: Path, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Read the index of each pixel, uint8 (H, W), of an image with a palette or with grey values.

    Raises:
        DataError: the file is missing, damaged, in colour, or has more than ``max_pixels``; it is named.
    """
    try:
        data = read_image(path)
        if not data:
            raise ValueError("empty file")
        need_bounded(path, stored_size(data), max_pixels=max_pixels)
        with open_image(data) as image:
            if image.mode not in _MODES:
                raise ImageError(
                    path,
                    f"an image of the kind {image.mode}, expected class indices: a palette or 8-bit grey values; convert "
                    "its colours to indices",
                )
            image.load()
            return np.array(image, dtype=np.uint8)
    except DataError:
        raise
    except Exception as error:  # a damaged file can raise any exception inside the decoding library
        raise ImageError(path, f"not a readable mask ({reason_of(error)}); replace the file") from error


def write_indices(indices: NDArray[np.uint8], path: Path) -> None:
    """Write indices, uint8 (H, W), as a PNG with the palette of Pascal VOC.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        outputs.write_bytes(path, png_of_indices(indices))
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({reason_of(error)})") from error


def png_of_indices(indices: NDArray[np.uint8]) -> bytes:
    """Return indices, uint8 (H, W), as a PNG with the palette of Pascal VOC."""
    from PIL import Image  # imported here so that printing a plan needs no image library

    image = Image.fromarray(np.ascontiguousarray(indices))
    image.putpalette(colours().tobytes())
    content = io.BytesIO()
    image.save(content, format="PNG")
    return content.getvalue()


@cache
def colours() -> NDArray[np.uint8]:
    """Return the colour of each index, uint8 (256, 3) RGB, as Pascal VOC's development kit defines them.

    The bits of an index, from the lowest, are dealt to red, green and blue in turn, to the highest bit first.
    """
    table = np.zeros((256, 3), dtype=np.uint8)
    for index in range(256):
        for bit in range(8):
            table[index, bit % 3] |= ((index >> bit) & 1) << (7 - bit // 3)
    return table
