"""Draw one canvas of the embedded data sets: digits of scikit-learn on a clouded gradient."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.handwritten import handwritten_digits

_TRIES = 40
_VAL_SHARE = 5
"""Every fifth digit image is used for val only, so that no stroke occurs in both splits."""


_INK = 0.4
"""Opacity from which a pixel belongs to a digit's box."""
_CORE, _EDGE = 0.6, 0.2
"""Opacity from which a pixel surely belongs to a digit, and up to which it surely does not."""
UNCERTAIN = 255
"""Class index of the pixels between, on the edge of a stroke."""


@dataclass(frozen=True, slots=True, eq=False)
class Canvas:
    """An image of digits with its labels. N is 1 to 6."""

    image: NDArray[np.uint8]
    """(size, size, 3) RGB."""
    boxes: NDArray[np.int64]
    """(N, 4) xyxy in whole pixels around the ink."""
    labels: NDArray[np.int64]
    """(N,)"""
    mask: NDArray[np.uint8]
    """(size, size): 0, or 1 + the digit whose ink is there, or ``UNCERTAIN``."""


def canvas(split: Literal["train", "val"], index: int, *, size: int, seed: int) -> Canvas:
    """Draw a canvas, a function of its arguments alone."""
    rng = np.random.Generator(np.random.PCG64([seed, ("train", "val").index(split), index]))
    image = _background(rng, size)
    strokes, classes = _strokes(split)
    boxes: list[tuple[int, int, int, int]] = []
    labels: list[int] = []
    mask = np.zeros((size, size), dtype=np.uint8)
    for _ in range(int(rng.integers(2, 7))):
        stroke_index = int(rng.integers(len(strokes)))
        ink = _ink(strokes[stroke_index], rng, height_px=size * rng.uniform(0.18, 0.45))
        place = _free_place(rng, ink.shape, boxes, size)
        if place is None:
            continue
        left, top = place
        _paint(image[top : top + ink.shape[0], left : left + ink.shape[1]], ink, rng)
        part = mask[top : top + ink.shape[0], left : left + ink.shape[1]]
        part[ink > _EDGE] = UNCERTAIN
        part[ink >= _CORE] = 1 + classes[stroke_index]
        is_ink = ink > _INK
        rows, columns = np.flatnonzero(is_ink.any(axis=1)), np.flatnonzero(is_ink.any(axis=0))
        boxes.append((left + int(columns[0]), top + int(rows[0]), left + int(columns[-1]) + 1, top + int(rows[-1]) + 1))
        labels.append(int(classes[stroke_index]))
    pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return Canvas(
        image=pixels,
        boxes=np.array(boxes, dtype=np.int64).reshape(-1, 4),
        labels=np.array(labels, dtype=np.int64),
        mask=mask,
    )


@cache
def _strokes(split: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the digit images (N, 8, 8) from 0 to 1 of one split, and their classes (N,)."""
    images, classes = handwritten_digits()
    is_val = np.arange(len(classes)) % _VAL_SHARE == 0
    is_in_split = is_val if split == "val" else ~is_val
    return (images[is_in_split] / 16.0).astype(np.float32), classes[is_in_split]


def _background(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    """Draw a gradient between two muted colours, with cloudy texture and fine grain."""
    first, second = rng.uniform(30, 225) + rng.uniform(-45, 45, size=(2, 3))
    second = first + np.clip(second - first, -60, 60)
    angle = rng.uniform(0, 2 * np.pi)
    axis = np.linspace(-0.5, 0.5, size, dtype=np.float32)
    slope = axis[None, :] * np.cos(angle) + axis[:, None] * np.sin(angle) + 0.5
    image = first + slope[:, :, None] * (second - first)
    for cells, strength in ((4, 14.0), (16, 7.0)):
        coarse = rng.normal(0, strength, size=(cells, cells)).astype(np.float32)
        image = image + cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)[:, :, None]
    return np.asarray(image + rng.normal(0, 4.0, size=(size, size, 1)), dtype=np.float32)


def _ink(stroke: NDArray[np.float32], rng: np.random.Generator, *, height_px: float) -> NDArray[np.float32]:
    """Return the opacity (H, W) of one digit, H about ``height_px``, cropped to its ink, with smooth edges at any
    size."""
    padded = np.pad(stroke, 2)
    # Enlarged before it is turned, so that an image of 8 x 8 pixels has smooth edges at any size.
    fine_px = 16 * len(padded)
    enlarged = cv2.resize(padded, (fine_px, fine_px), interpolation=cv2.INTER_CUBIC)
    matrix = cv2.getRotationMatrix2D((fine_px / 2, fine_px / 2), rng.uniform(-12, 12), 1.0)
    stretch = rng.uniform(0.9, 1.15)
    matrix[0] *= stretch
    matrix[0, 2] += (1 - stretch) * fine_px / 2
    enlarged = cv2.GaussianBlur(cv2.warpAffine(enlarged, matrix, (fine_px, fine_px)), (0, 0), 3)
    edge = 1 / (1 + np.exp(-(enlarged - 0.52) * 24))
    is_ink = edge > _INK
    rows, columns = np.flatnonzero(is_ink.any(axis=1)), np.flatnonzero(is_ink.any(axis=0))
    cropped = edge[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    width_px = max(3, round(cropped.shape[1] * height_px / cropped.shape[0]))
    return np.asarray(
        np.clip(cv2.resize(cropped, (width_px, max(3, round(height_px))), interpolation=cv2.INTER_AREA), 0, 1),
        np.float32,
    )


def _free_place(
    rng: np.random.Generator, shape: tuple[int, ...], boxes: Sequence[tuple[int, int, int, int]], size: int
) -> tuple[int, int] | None:
    """Return left and top of a random place that touches no other digit; None if no try finds one."""
    height, width = shape[:2]
    if width > size or height > size:
        return None
    for _ in range(_TRIES):
        left, top = int(rng.integers(size - width + 1)), int(rng.integers(size - height + 1))
        if all(left >= x2 or left + width <= x1 or top >= y2 or top + height <= y1 for x1, y1, x2, y2 in boxes):
            return left, top
    return None


def _paint(region: NDArray[np.float32], ink: NDArray[np.float32], rng: np.random.Generator) -> None:
    """Lay one digit on a region of its shape, in place, in a colour that stands out from what is below it."""
    weights = np.array([0.299, 0.587, 0.114])
    below = float((region.reshape(-1, 3).mean(axis=0) * weights).sum())
    colour = rng.uniform(0, 255, size=3)
    brightness = float((colour * weights).sum())
    wanted = rng.uniform(0, max(below - 90, 10)) if below > 127 else rng.uniform(min(below + 90, 245), 255)
    colour = np.clip(colour + (wanted - brightness), 0, 255)
    region += ink[:, :, None] * (colour - region)
