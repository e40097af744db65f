"""Finish a training image: HSV gains, flips, and boxes as rows of a batch."""

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.colour import random_gains, scale_hsv
from mtrain.data.images.geometry import targets
from mtrain.data.images.section import VariationSpec

Labelled = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Boxes (N, 4) xyxy in pixels of the network input, and labels (N,)."""


def finish(
    rng: np.random.Generator, spec: VariationSpec, labelled: Labelled, out: NDArray[np.uint8], *, edge_px: float
) -> NDArray[np.float32]:
    """Change the colours of ``out`` (S, S, 3) and flip it, in place; return what ``geometry.targets`` makes of its boxes."""
    boxes, labels = labelled
    gains = random_gains(rng, spec)
    if gains != (1.0, 1.0, 1.0):
        scale_hsv(out, gains)
    return targets(_flip(rng, spec, boxes, out), labels, len(out), edge_px=edge_px)


def _flip(
    rng: np.random.Generator, spec: VariationSpec, boxes: NDArray[np.float64], out: NDArray[np.uint8]
) -> NDArray[np.float64]:
    side = len(out)
    up_down, left_right = rng.random(2) < (spec.flip_ud, spec.flip_lr)
    if up_down:
        boxes = np.stack([boxes[:, 0], side - boxes[:, 3], boxes[:, 2], side - boxes[:, 1]], axis=1)
    if left_right:
        boxes = np.stack([side - boxes[:, 2], boxes[:, 1], side - boxes[:, 0], boxes[:, 3]], axis=1)
    if up_down or left_right:
        cv2.flip(out, -1 if up_down and left_right else int(left_right), dst=out)
    return boxes
