"""Bring images of any size to the square input of a classifier: resize the shorter side and cut out a square.

The definitions are those that torchvision documents (``Resize``, ``CenterCrop``, ``RandomResizedCrop``), computed with
Pillow's antialiased bilinear filter as torchvision does for images of Pillow; the random window goes back to Szegedy et
al. 2015 (arXiv 1409.4842, section 6).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ATTEMPTS = 10
"""Windows that are drawn before the largest central one is taken."""
MAX_RESIZED_PIXELS = 100_000_000
"""Largest resized image from which a centre is cut out; of a longer one, only the centre is computed. A line of 30,000
pixels, resized to 224 pixels of height, would need 4.5 GB."""
Window = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""


def resize(image: NDArray[np.uint8], *, width: int, height: int) -> NDArray[np.uint8]:
    """Resize an image (H, W, 3) with Pillow's antialiased bilinear filter; unchanged where it has that size."""
    if image.shape[:2] == (height, width):
        return image
    resizable = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(resizable.resize((width, height), Image.Resampling.BILINEAR), dtype=np.uint8)


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
