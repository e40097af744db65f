"""Smooth the curves of a run."""

import numpy as np

from mtrain.core.interfaces import Array


def smooth_curve(values: Array, *, share: float = 0.04) -> Array:
    """Return a centred moving average over ``share`` of the points; near the ends it covers fewer points."""
    width = max(1, int(len(values) * share) // 2 * 2 + 1)
    if width < 3:
        return values
    kernel = np.ones(width)
    return np.asarray(np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same"))
