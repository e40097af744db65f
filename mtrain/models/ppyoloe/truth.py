"""Group the objects of a micro batch by image, on the host. Needs no framework.

Shape letters: B batch, N objects of an image (padded), T objects of the micro batch.
"""

from typing import Literal

import numpy as np

from mtrain.core.interfaces import Array

Factors = Literal["none", "backbone", "everywhere"]
"""Where blocks of the network have learned factors."""
STATIC = "static"
"""Name in an arranged micro batch that says by its presence, which the host knows, that objects are assigned statically."""
_STEPS = 8
"""Numbers of rows between a power of two and the next one."""


def rows_for(count: int) -> int:
    """Return the number of rows to which ``count`` objects of an image are padded: at least 1, at most an eighth more.

    The assigners' memory grows with it. Powers of two have eight steps in between, so that shapes repeat and kernels, plans
    and blocks of memory can be used again.
    """
    step: int = max(2 ** (max(count, 1).bit_length() - 1) // _STEPS, 1)
    rows: int = max(-(-count // step) * step, 1)
    return rows


def group_rows(targets_T6: Array, *, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Group target rows by image, and convert their boxes to corners in pixels.

    Args:
        targets_T6: Rows ``[image, class, xc, yc, w, h]``, boxes as shares of the image.
        shape: (B, height, width) of the images.

    Returns:
        Labels int64 (B, N) and boxes float32 (B, N, 4) in pixels; rows without an object are zeros.
    """
    batch, height, width = shape
    image_T = targets_T6[:, 0].astype(np.int64)
    order_T = np.argsort(image_T, kind="stable")
    image_T = image_T[order_T]
    counts_B = np.bincount(image_T, minlength=batch)
    row_T = np.arange(len(image_T)) - (np.cumsum(counts_B) - counts_B)[image_T]
    count = rows_for(int(counts_B.max(initial=0)))
    centre_T2, half_T2 = targets_T6[order_T, 2:4], targets_T6[order_T, 4:6] / 2
    sides = np.asarray((width, height), np.float32)
    labels_BN, boxes_BN4 = np.zeros((batch, count), np.int64), np.zeros((batch, count, 4), np.float32)
    labels_BN[image_T, row_T] = targets_T6[order_T, 1]
    boxes_BN4[image_T, row_T, :2] = (centre_T2 - half_T2) * sides
    boxes_BN4[image_T, row_T, 2:] = (centre_T2 + half_T2) * sides
    return labels_BN, boxes_BN4
