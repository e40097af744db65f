"""Varied copies of the images of a micro batch, for test-time augmentation."""

from collections.abc import Sequence

import cv2
import numpy as np

from mtrain.core.interfaces import Array, Variation

PADDING = 114
"""Grey value of pixels outside an image, as letterboxing has it."""


def vary_images(images_BHW3: Array, kinds: Sequence[tuple[bool, float]], *, step: int) -> list[tuple[Array, Variation]]:
    """Return a copy of the images for each of ``kinds``: (mirrored left to right, scale).

    A smaller copy is padded on the right and below until its sides are multiples of ``step`` again.

    Args:
        images_BHW3: Images, uint8 (B, H, W, 3).
        kinds: What to make; (False, 1.0) is the images themselves.
        step: Number of which the sides must be multiples.
    """
    return [_vary(images_BHW3, mirrored, scale, step) for mirrored, scale in kinds]


def _vary(images_BHW3: Array, mirrored: bool, scale: float, step: int) -> tuple[Array, Variation]:  # noqa: FBT001
    _, height, width, _ = images_BHW3.shape
    copies = np.ascontiguousarray(images_BHW3[:, :, ::-1]) if mirrored else images_BHW3
    rows, columns = round(height * scale), round(width * scale)
    if (rows, columns) != (height, width):
        small = np.stack([cv2.resize(image, (columns, rows), interpolation=cv2.INTER_LINEAR) for image in copies])
        below, right = -rows % step, -columns % step
        copies = np.pad(small, ((0, 0), (0, below), (0, right), (0, 0)), constant_values=PADDING)
    return copies, Variation(mirrored=mirrored, scale=columns / width, width=width)
