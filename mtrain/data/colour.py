"""Colour changes of uint8 RGB pictures, in place."""

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.core.spec import AugmentSpec

HUES = 180
"""OpenCV's hue circle in uint8."""
STRIPE_BYTES = 96 * 1024
"""Rows of a picture that are converted at once."""


def random_gains(rng: np.random.Generator, spec: AugmentSpec) -> tuple[float, float, float]:
    """Factors of hue, saturation and value, each uniform in 1 +- its range."""
    hue, saturation, value = rng.uniform(-1.0, 1.0, 3) * (spec.hsv_h, spec.hsv_s, spec.hsv_v) + 1.0
    return float(hue), float(saturation), float(value)


def scale_hsv(picture: NDArray[np.uint8], gains: tuple[float, float, float]) -> None:
    """Multiply hue (modulo the circle), saturation and value (saturating) of ``picture`` (H, W, 3) RGB, in place.

    One diagonal 3x3 transform scales all three planes, 3x cheaper than split, three tables and merge. A hue of 180 to
    255 is beyond the circle's end and OpenCV wraps it on the way back; larger products would saturate, so they take a
    table.
    """
    hue, saturation, value = gains
    table = None
    if hue * (HUES - 1) >= 255:
        table, hue = (np.arange(256) * hue % HUES).astype(np.uint8), 1.0
    factors = np.diag(np.array([hue, saturation, value], dtype=np.float32))
    rows = max(1, STRIPE_BYTES // max(picture[0].nbytes, 1))
    for start in range(0, len(picture), rows):
        stripe = picture[start : start + rows]
        hsv = cv2.cvtColor(stripe, cv2.COLOR_RGB2HSV)
        if table is not None:
            cv2.insertChannel(cv2.LUT(cv2.extractChannel(hsv, 0), table), hsv, 0)
        cv2.cvtColor(cv2.transform(hsv, factors), cv2.COLOR_HSV2RGB, dst=stripe)
