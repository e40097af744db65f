"""Bring images of any size to the square input of a classifier: resize the shorter side and cut out a square.

The definitions are those that torchvision documents (``Resize``, ``CenterCrop``, ``RandomResizedCrop``), computed with
Pillow's antialiased bilinear filter as torchvision does for images of Pillow; the random window goes back to Szegedy et
al. 2015 (arXiv 1409.4842, section 6).
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mtrain.core.compiling import load_function

ATTEMPTS = 10
"""Windows that are drawn before the largest central one is taken."""
MAX_RESIZED_PIXELS = 100_000_000
"""Largest resized image from which a centre is cut out; of a longer one, only the centre is computed. A line of 30,000
pixels, resized to 224 pixels of height, would need 4.5 GB."""
Window = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""
SOURCE = Path(__file__).with_name("resample.c")
Resize = Callable[[NDArray[np.uint8], int, int], NDArray[np.uint8]]
"""Takes an image (H, W, 3), a width and a height."""


def resize(image: NDArray[np.uint8], *, width: int, height: int) -> NDArray[np.uint8]:
    """Resize an image (H, W, 3) with Pillow's antialiased bilinear filter; unchanged where it has that size.

    A compiled loop does it where there is a C compiler, at a third of Pillow's cost and with its bytes.
    """
    if image.shape[:2] == (height, width):
        return image
    return (load_resize() or _resize_by_pillow)(image, width, height)


def _resize_by_pillow(image: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    resizable = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(resizable.resize((width, height), Image.Resampling.BILINEAR), dtype=np.uint8)


@cache
def load_resize() -> Resize | None:
    """Load the loop into this process, after compiling it where that was not done before; None if that cannot be."""
    address, size = ctypes.c_void_p, ctypes.c_long
    types = (address, size, size, size, address, size, size, ctypes.c_int)
    function = load_function(SOURCE, "mtrain_resize_rgb", *types)
    if function is None:
        return None

    def resize(image: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
        image = image if image.strides[1:] == (3, 1) else np.ascontiguousarray(image)
        out = np.empty((height, width, 3), np.uint8)
        # Pillow's rule since version 13: the first pass is the one that leaves fewer pixels for the second.
        down_first = image.shape[0] - height > max(2 * (image.shape[1] - width), 0)
        given = (image.ctypes.data, image.strides[0], image.shape[1], image.shape[0])
        if not function(*given, out.ctypes.data, width, height, down_first):
            raise MemoryError("no memory to resize an image")
        return out

    # A miscompiled loop, or one that another version of Pillow does not agree with, is never used.
    image = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    sizes = ((20, 30), (28, 9), (45, 50))
    return resize if all(np.array_equal(resize(image, *s), _resize_by_pillow(image, *s)) for s in sizes) else None


def centre_cropped(image: NDArray[np.uint8], *, side: int, share: float) -> NDArray[np.uint8]:
    """Resize the shorter side to ``side / share`` pixels, and return the central square of ``side`` pixels."""
    height, width = image.shape[:2]
    short = max(round(side / share), side)
    if width <= height:
        width, height = short, max(int(short * height / width), short)
    else:
        width, height = max(int(short * width / height), short), short
    left, top = round((width - side) / 2.0), round((height - side) / 2.0)
    if width * height > MAX_RESIZED_PIXELS:
        scale_x, scale_y = image.shape[1] / width, image.shape[0] / height
        box = (left * scale_x, top * scale_y, (left + side) * scale_x, (top + side) * scale_y)
        resizable = Image.fromarray(np.ascontiguousarray(image))
        return np.asarray(resizable.resize((side, side), Image.Resampling.BILINEAR, box=box), dtype=np.uint8)
    image = resize(image, width=width, height=height)
    return image[top : top + side, left : left + side]


def random_window(
    rng: np.random.Generator, size_wh: tuple[int, int], *, scale: Sequence[float], aspect_ratio: Sequence[float]
) -> Window:
    """Draw a window by its share of the image's area (``scale``) and its width / height (``aspect_ratio``).

    The logarithm of the aspect ratio is uniform. If no window of :data:`ATTEMPTS` fits, the largest central one with an
    allowed aspect ratio is returned.
    """
    width, height = size_wh
    # In the logarithm, 1:2 is as likely as 2:1.
    log_low, log_high = math.log(aspect_ratio[0]), math.log(aspect_ratio[1])
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(scale[0], scale[1])
        aspect = math.exp(rng.uniform(log_low, log_high))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            return int(rng.integers(0, width - wide + 1)), int(rng.integers(0, height - high + 1)), wide, high
    wide, high = width, height
    if width / height < aspect_ratio[0]:
        high = min(max(round(width / aspect_ratio[0]), 1), height)
    elif width / height > aspect_ratio[1]:
        wide = min(max(round(height * aspect_ratio[1]), 1), width)
    return (width - wide) // 2, (height - high) // 2, wide, high


def window_of(image: NDArray[np.uint8], window: Window, *, side: int) -> NDArray[np.uint8]:
    """Return a window of an image, resized to ``side`` x ``side``."""
    left, top, width, height = window
    return resize(image[top : top + height, left : left + width], width=side, height=side)
