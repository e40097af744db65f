"""Locate the bright red rectangles of the generated images by their pixels."""

import cv2
import numpy as np


def ink(image: np.ndarray) -> np.ndarray:
    """Corners xyxy of the red regions."""
    image = image.astype(int)
    mask = (image[:, :, 0] - np.maximum(image[:, :, 1], image[:, :, 2]) > 115).astype(np.uint8)
    _, _, statistics, _ = cv2.connectedComponentsWithStats(mask)
    x, y, w, h, area = statistics[1:].T
    return np.stack([x, y, x + w, y + h], axis=1)[area >= 12]


def corners(targets: np.ndarray, side: int) -> np.ndarray:
    """(N, 4) xyxy in pixels of rows ``[class, xc, yc, w, h]``."""
    return np.concatenate([targets[:, 1:3] - targets[:, 3:] / 2, targets[:, 1:3] + targets[:, 3:] / 2], axis=1) * side
