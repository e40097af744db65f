"""Bring images and masks to the square input of the network, and predictions back to the image."""

from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.geometry import FILL

Resize = Literal["letterbox", "stretch"]


@dataclass(frozen=True, slots=True)
class FittedPlace:
    """The place of an image on the input: its size there, and its left upper corner, which may be outside."""

    width: int
    height: int
    left: int
    top: int


def fit_image(size_wh: tuple[int, int], *, side: int, resize: Resize) -> FittedPlace:
    """Return the place of a whole image of width and height ``size_wh`` on an input of ``side`` pixels."""
    width, height = fitted_size(size_wh, side=side, resize=resize)
    return FittedPlace(width, height, (side - width) // 2, (side - height) // 2)


def fitted_size(size_wh: tuple[int, int], *, side: int, resize: Resize, zoom: float = 1.0) -> tuple[int, int]:
    """Return width and height of an image on the input, times ``zoom``."""
    width, height = size_wh
    across, down = (side / max(size_wh),) * 2 if resize == "letterbox" else (side / width, side / height)
    return max(round(width * across * zoom), 1), max(round(height * down * zoom), 1)


def lay(image: NDArray[np.uint8], place: FittedPlace, out: NDArray[np.uint8]) -> None:
    """Draw an image (H, W, 3) at its place on ``out`` (S, S, 3); the rest becomes grey."""
    shrinks = place.width < image.shape[1] or place.height < image.shape[0]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    out[...] = FILL
    _lay(_resize(image, place, method), place, out)


def lay_mask(mask: NDArray[np.uint8], place: FittedPlace, out: NDArray[np.uint8], *, fill: int) -> None:
    """Draw a mask (H, W) at its place on ``out`` (S, S), each pixel as the nearest one; the rest becomes ``fill``."""
    out[...] = fill
    _lay(_resize(mask, place, cv2.INTER_NEAREST_EXACT), place, out)


def _resize(image: NDArray[np.uint8], place: FittedPlace, method: int) -> NDArray[np.uint8]:
    if image.shape[:2] == (place.height, place.width):
        return image
    return np.asarray(cv2.resize(image, (place.width, place.height), interpolation=method), dtype=np.uint8)


def _lay(resized: NDArray[np.uint8], place: FittedPlace, out: NDArray[np.uint8]) -> None:
    side = len(out)
    x1, y1 = max(place.left, 0), max(place.top, 0)
    x2, y2 = min(place.left + place.width, side), min(place.top + place.height, side)
    out[y1:y2, x1:x2] = resized[y1 - place.top : y2 - place.top, x1 - place.left : x2 - place.left]


def back(values: NDArray[np.uint8], size_wh: tuple[int, int], *, resize: Resize) -> NDArray[np.uint8]:
    """Return values of the input's pixels (S, S) for each pixel (H, W) of the whole image, from the nearest one."""
    place = fit_image(size_wh, side=len(values), resize=resize)
    columns = place.left + ((np.arange(size_wh[0]) + 0.5) * place.width / size_wh[0]).astype(np.int64)
    rows = place.top + ((np.arange(size_wh[1]) + 0.5) * place.height / size_wh[1]).astype(np.int64)
    return values[np.ix_(rows, columns)]
