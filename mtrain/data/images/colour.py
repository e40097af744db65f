"""Change the colours of uint8 RGB images, in place."""

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.section import DistortSpec, VariationSpec

HUES = 180
"""Length of OpenCV's hue circle for uint8 images."""
YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
"""Matrix from RGB to NTSC's YIQ space (luma and two chroma axes)."""
STRIPE_BYTES = 96 * 1024
"""Size of the stripe of rows that is converted at once, in bytes."""


def random_gains(rng: np.random.Generator, spec: VariationSpec) -> tuple[float, float, float]:
    """Draw the factors of hue, saturation and value, each uniform in 1 +- its range."""
    hue, saturation, value = rng.uniform(-1.0, 1.0, 3) * (spec.hsv_h, spec.hsv_s, spec.hsv_v) + 1.0
    return float(hue), float(saturation), float(value)


def scale_hsv(image: NDArray[np.uint8], gains: tuple[float, float, float]) -> None:
    """Multiply hue (modulo the circle), saturation and value (saturating) of ``image`` (H, W, 3) RGB, in place.

    One diagonal 3x3 transform scales all three planes, 3x cheaper than split, three tables and merge. A hue of 180 to
    255 is beyond the circle's end and OpenCV wraps it on the way back; larger products would saturate, so they take a
    table.
    """
    hue, saturation, value = gains
    table = None
    if hue * (HUES - 1) >= 255:
        table, hue = (np.arange(256) * hue % HUES).astype(np.uint8), 1.0
    factors = np.diag(np.array([hue, saturation, value], dtype=np.float32))
    rows = max(1, STRIPE_BYTES // max(image[0].nbytes, 1))
    for start in range(0, len(image), rows):
        stripe = image[start : start + rows]
        hsv = cv2.cvtColor(stripe, cv2.COLOR_RGB2HSV)
        if table is not None:
            cv2.insertChannel(cv2.LUT(cv2.extractChannel(hsv, 0), table), hsv, 0)
        cv2.cvtColor(cv2.transform(hsv, factors), cv2.COLOR_HSV2RGB, dst=stripe)


def random_distortion(rng: np.random.Generator, spec: DistortSpec) -> NDArray[np.float64]:
    """Return a (3, 4) matrix, rgb -> M[:, :3] rgb + M[:, 3], that combines the steps of ``spec`` in random order.

    All of them are linear in RGB, so values saturate once, at the end.
    """
    steps = [_brightness, _contrast, _saturation, _hue]
    total = np.eye(4)
    for number in rng.permutation(len(steps)).tolist():
        if rng.random() < spec.probability:
            total = steps[number](rng, spec) @ total
    return total[:3]


def distort(image: NDArray[np.uint8], matrix: NDArray[np.float64]) -> None:
    """Apply a (3, 4) ``matrix`` to every pixel of ``image`` (H, W, 3) RGB, in place; values saturate."""
    if not np.array_equal(matrix, np.eye(3, 4)):
        cv2.transform(image, matrix, dst=image)


def _brightness(rng: np.random.Generator, spec: DistortSpec) -> NDArray[np.float64]:
    step = np.eye(4)
    step[:3, 3] = rng.uniform(spec.brightness[0], spec.brightness[1])
    return step


def _contrast(rng: np.random.Generator, spec: DistortSpec) -> NDArray[np.float64]:
    return np.diag([rng.uniform(spec.contrast[0], spec.contrast[1])] * 3 + [1.0])


def _saturation(rng: np.random.Generator, spec: DistortSpec) -> NDArray[np.float64]:
    factor = rng.uniform(spec.saturation[0], spec.saturation[1])
    step = np.eye(4)
    step[:3, :3] = factor * np.eye(3) + (1 - factor) * YIQ[0]
    return step


def _hue(rng: np.random.Generator, spec: DistortSpec) -> NDArray[np.float64]:
    angle = np.radians(rng.uniform(-1.0, 1.0) * spec.hue)
    turn = np.eye(3)
    turn[1:, 1:] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    step = np.eye(4)
    step[:3, :3] = np.linalg.inv(YIQ) @ turn @ YIQ
    return step
