"""Move pixels and boxes: letterboxing, the random affine map, and the filter of boxes that survive it.

Letters of shapes: N boxes, H W image height and width. Boxes are xyxy in pixels unless a name says otherwise.
Public sources: the YOLOv5 papers and documentation (letterbox with colour 114; rotation, scale, shear and translation
composed around the image's centre).
"""

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.section import VariationSpec

FILL = 114
"""Grey level of every pixel that no image covers."""
EDGE_PX = 1e-3
"""Distance in pixels by which boxes end inside the right and lower border of letterboxed images, as YOLOv5 has them, so that a
normalised corner is below 1."""
HORIZON = 0.05
"""Smallest third (homogeneous) coordinate of a visible corner; smaller ones lie at or beyond the
perspective's horizon."""

MAP_DRAWS = 8
"""Random numbers that ``random_map`` draws."""


def fitted_size(width: int, height: int, side: int) -> tuple[int, int]:
    """Return (width, height) after scaling the longest side to ``side``; the other side is rounded up."""
    ratio = side / max(width, height)
    return min(math.ceil(width * ratio), side), min(math.ceil(height * ratio), side)


def margin(pad: float) -> int:
    """Return the whole pixels of padding before the image, where ``pad`` is half of the total; an odd pixel goes
    after it."""
    # 0.1 less, so that of an odd number of pixels the larger half lies behind the image, as in YOLOv5.
    return round(pad - 0.1)


def letterbox(image: NDArray[np.uint8], shape_hw: tuple[int, int]) -> NDArray[np.uint8]:
    """Fit ``image`` (H, W, 3) into ``shape_hw`` keeping its aspect ratio, centred on grey."""
    height, width = image.shape[:2]
    ratio = min(shape_hw[0] / height, shape_hw[1] / width)
    new_wh = (max(round(width * ratio), 1), max(round(height * ratio), 1))
    if (width, height) != new_wh:
        image = np.asarray(cv2.resize(image, new_wh, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
    boxed = np.full((*shape_hw, 3), FILL, dtype=np.uint8)
    top, left = margin((shape_hw[0] - new_wh[1]) / 2), margin((shape_hw[1] - new_wh[0]) / 2)
    boxed[top : top + new_wh[1], left : left + new_wh[0]] = image
    return boxed


def random_map(
    rng: np.random.Generator, spec: VariationSpec, *, canvas: int, side: int
) -> tuple[NDArray[np.float64], float]:
    """Draw a random map from a square canvas to the square output: a (3, 3) matrix and its zoom.

    Perspective, then rotation and zoom, then shear act about the canvas' centre; then the centre moves to half the
    output, shifted by up to ``translate`` of its side.
    """
    centre = np.array([[1.0, 0.0, -canvas / 2], [0.0, 1.0, -canvas / 2], [0.0, 0.0, 1.0]])
    tilt_x, tilt_y = rng.uniform(-1.0, 1.0, 2) * spec.perspective
    tilt = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [tilt_x, tilt_y, 1.0]])
    angle = math.radians(rng.uniform(-1.0, 1.0) * spec.degrees)
    zoom = 1.0 + rng.uniform(-1.0, 1.0) * spec.scale
    cosine, sine = zoom * math.cos(angle), zoom * math.sin(angle)
    turn = np.array([[cosine, sine, 0.0], [-sine, cosine, 0.0], [0.0, 0.0, 1.0]])
    shear_x, shear_y = np.tan(np.radians(rng.uniform(-1.0, 1.0, 2) * spec.shear))
    lean = np.array([[1.0, shear_x, 0.0], [shear_y, 1.0, 0.0], [0.0, 0.0, 1.0]])
    shift_x, shift_y = (0.5 + rng.uniform(-1.0, 1.0, 2) * spec.translate) * side
    shift = np.array([[1.0, 0.0, shift_x], [0.0, 1.0, shift_y], [0.0, 0.0, 1.0]])
    return shift @ lean @ turn @ tilt @ centre, zoom


def is_upright(matrix: NDArray[np.float64]) -> bool:
    """Return whether a map only zooms and shifts, so that rectangles stay rectangles."""
    (a, b, _), (c, d, _), (e, f, _) = matrix.tolist()
    return bool(b == c == e == f == 0 and a > 0 and d > 0)


def map_boxes(boxes_N4: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (N, 4) axis-aligned boxes around the mapped corners of ``boxes_N4``.

    A box with a corner beyond the horizon of a perspective has no image: it becomes (0, 0, 0, 0).
    """
    x1, y1, x2, y2 = boxes_N4.T
    corners = np.stack([np.stack([x1, x2, x1, x2]), np.stack([y1, y1, y2, y2]), np.ones((4, len(boxes_N4)))])
    mapped = np.tensordot(matrix, corners, axes=1)
    # Dividing by a coordinate of 0 or less would mirror the corner to the other side of the image.
    beyond_horizon = (mapped[2] < HORIZON).any(axis=0)
    points = mapped[:2] / np.where(mapped[2] < HORIZON, 1.0, mapped[2])
    around: NDArray[np.float64] = np.concatenate([points.min(axis=1), points.max(axis=1)]).T
    around[beyond_horizon] = 0.0
    return around


def survives(
    before_N4: NDArray[np.float64],
    after_N4: NDArray[np.float64],
    *,
    least_px: float = 2.0,
    least_area: float = 0.1,
    most_aspect: float = 100.0,
) -> NDArray[np.bool_]:
    """Return (N,) True for boxes still worth learning: wider and higher than ``least_px``, with an aspect ratio below
    ``most_aspect``, and with more than the share ``least_area`` of their area left. The share compares with
    ``before_N4``, the uncut boxes at the output's zoom."""
    width, height = after_N4[:, 2] - after_N4[:, 0], after_N4[:, 3] - after_N4[:, 1]
    area_before = (before_N4[:, 2] - before_N4[:, 0]) * (before_N4[:, 3] - before_N4[:, 1])
    # Keeps the quotients of boxes without area finite.
    tiny = 1e-16
    aspect = np.maximum(width / (height + tiny), height / (width + tiny))
    large = (width > least_px) & (height > least_px)
    survivors: NDArray[np.bool_] = large & (width * height / (area_before + tiny) > least_area) & (aspect < most_aspect)
    return survivors


def targets(
    boxes_N4: NDArray[np.float64], labels_N: NDArray[np.int64], side: int, *, edge_px: float
) -> NDArray[np.float32]:
    """Return (N, 5) rows ``[class, xc, yc, w, h]``: boxes clipped to the image and normalised by its side.

    ``edge_px``: distance from the right and lower border at which they end: ``EDGE_PX`` as YOLOv5 has it, 0 as others do.
    """
    boxes = np.clip(boxes_N4, 0.0, side - edge_px)
    rows = np.empty((len(boxes), 5), dtype=np.float32)
    rows[:, 0] = labels_N
    rows[:, 1:3] = (boxes[:, :2] + boxes[:, 2:]) / (2 * side)
    rows[:, 3:5] = (boxes[:, 2:] - boxes[:, :2]) / side
    return rows
