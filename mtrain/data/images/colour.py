"""Change the colours of uint8 RGB images, in place."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.section import DistortSpec

HUES = 180
"""Length of OpenCV's hue circle for uint8 images."""
YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
"""Matrix from RGB to NTSC's YIQ space (luma and two chroma axes)."""
FULL_HUES = 256
"""Length of OpenCV's other hue circle for uint8 images, which is also Pillow's."""
Change = Callable[[NDArray[np.uint8]], None]
"""Changes the colours of an image (H, W, 3) in place."""
STRIPE_BYTES = 96 * 1024
"""Size of the stripe of rows that is converted at once, in bytes."""


def random_gains(rng: np.random.Generator, spec: Any) -> tuple[float, float, float]:
    """Draw the factors of hue, saturation and value, each uniform in 1 +- its range: ``hsv_h`` and so on of a section."""
    hue, saturation, value = rng.uniform(-1.0, 1.0, 3) * (spec.hsv_h, spec.hsv_s, spec.hsv_v) + 1.0
    return float(hue), float(saturation), float(value)


def scale_hsv(image: NDArray[np.uint8], gains: tuple[float, float, float]) -> None:
    """Multiply hue (modulo the circle), saturation and value (saturating) of ``image`` (H, W, 3) RGB, in place."""
    hue, saturation, value = gains
    table = None
    # A hue of 180 to 255 is beyond the circle's end, and OpenCV wraps it on
    # the way back; larger products would saturate, so they take a table.
    if hue * (HUES - 1) >= 255:
        table, hue = (np.arange(256) * hue % HUES).astype(np.uint8), 1.0
    # One diagonal transform scales all three planes, 3x cheaper than split, three tables and merge.
    factors = np.diag(np.array([hue, saturation, value], dtype=np.float32))
    rows = max(1, STRIPE_BYTES // max(image[0].nbytes, 1))
    for start in range(0, len(image), rows):
        stripe = image[start : start + rows]
        hsv = cv2.cvtColor(stripe, cv2.COLOR_RGB2HSV)
        if table is not None:
            cv2.insertChannel(cv2.LUT(cv2.extractChannel(hsv, 0), table), hsv, 0)
        cv2.cvtColor(cv2.transform(hsv, factors), cv2.COLOR_HSV2RGB, dst=stripe)


def drawn_distortion(rng: np.random.Generator, spec: DistortSpec) -> Change:
    """Draw the steps of ``spec``, and return the change of colours that they are."""
    if spec.form == "linear":
        return partial(distort, matrix=random_distortion(rng, spec))
    steps: tuple[tuple[Callable[[NDArray[np.uint8], float], None], tuple[float, float]], ...] = (
        (_scale_brightness, (spec.brightness[0], spec.brightness[1])),
        (_scale_contrast, (spec.contrast[0], spec.contrast[1])),
        (_scale_saturation, (spec.saturation[0], spec.saturation[1])),
        (_turn_hue, (-spec.hue, spec.hue)),
    )
    drawn = [
        (steps[number][0], float(rng.uniform(*steps[number][1])))
        for number in rng.permutation(len(steps)).tolist()
        if rng.random() < spec.probability
    ]
    return partial(enhance, steps=drawn)


def enhance(image: NDArray[np.uint8], steps: list[tuple[Callable[[NDArray[np.uint8], float], None], float]]) -> None:
    """Apply steps with their values to ``image`` (H, W, 3) RGB in turn, in place; values saturate after each."""
    for step, value in steps:
        step(image, value)


def random_distortion(rng: np.random.Generator, spec: DistortSpec) -> NDArray[np.float64]:
    """Return a (3, 4) matrix, rgb -> M[:, :3] rgb + M[:, 3], that combines the steps of ``spec`` in random order."""
    steps = [_brightness, _contrast, _saturation, _hue]
    total = np.eye(4)
    for number in rng.permutation(len(steps)).tolist():
        if rng.random() < spec.probability:
            # All of them are linear in RGB, so one matrix holds them, and values saturate once, at the end.
            total = steps[number](rng, spec) @ total
    return total[:3]


def distort(image: NDArray[np.uint8], matrix: NDArray[np.float64]) -> None:
    """Apply a (3, 4) ``matrix`` to every pixel of ``image`` (H, W, 3) RGB, in place; values saturate."""
    if not np.array_equal(matrix, np.eye(3, 4)):
        cv2.transform(image, matrix, dst=image)


def _scale_brightness(image: NDArray[np.uint8], factor: float) -> None:
    cv2.convertScaleAbs(image, dst=image, alpha=factor)


def _scale_contrast(image: NDArray[np.uint8], factor: float) -> None:
    """Scale the distance to the mean grey of the whole ``image``."""
    # Pillow's ImageEnhance.Contrast rounds the mean grey to a whole level.
    mean = int(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)
    matrix = np.diag([factor] * 3 + [1.0])[:3]
    matrix[:, 3] = (1 - factor) * mean
    cv2.transform(image, matrix, dst=image)


def _scale_saturation(image: NDArray[np.uint8], factor: float) -> None:
    cv2.transform(image, factor * np.eye(3) + (1 - factor) * YIQ[0], dst=image)


def _turn_hue(image: NDArray[np.uint8], degrees: float) -> None:
    """Turn the hue by whole 256ths of the circle, rounded down, as the original's uint8 image is."""
    turn = math.floor(degrees / 360 * FULL_HUES)
    if turn == 0:
        return
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
    hsv[..., 0] += np.uint8(turn % FULL_HUES)
    cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL, dst=image)


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
