"""Draw one training image stretched to a square: distort, expand, crop, flip, resize, in PP-YOLOE's order and ranges.

Positions are in pixels of the file's image unless a name says otherwise. Letters of shapes: A attempts, N boxes.
"""

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.colour import Change, drawn_distortion
from mtrain.data.images.geometry import survives
from mtrain.data.images.hsv_flip import finish
from mtrain.tasks.detection.augment.render import Axis
from mtrain.tasks.detection.image_cache import Images
from mtrain.tasks.detection.section import STRIDE, AugmentSpec, CropSpec, ExpandSpec

METHODS = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
    "lanczos4": cv2.INTER_LANCZOS4,
}
"""OpenCV's constant for each value of ``data.augment.interpolations``."""
SHARED = 1
"""Last element of the random key for numbers that the samples of an update share; a sample's own key ends in 0."""


@dataclass(frozen=True, slots=True)
class Window:
    """The visible rectangle of the plane in which the image lies with its upper left corner at (0, 0)."""

    left: int
    top: int
    width: int
    height: int

    @property
    def xyxy(self) -> NDArray[np.float64]:
        """Return the window's corners."""
        return np.array([self.left, self.top, self.left + self.width, self.top + self.height], dtype=np.float64)


def sides_of(spec: AugmentSpec, *, image_size: int) -> list[int]:
    """Return the sides in pixels from which the side of an update is drawn."""
    if spec.sizes is not None:
        return spec.sizes
    if not spec.multi_scale:
        return [image_size]
    first = max(math.ceil(image_size * (1 - spec.multi_scale) / STRIDE), 1)
    last = max(math.floor(image_size * (1 + spec.multi_scale) / STRIDE), first)
    return [STRIDE * count for count in range(first, last + 1)]


def shared_by_update(spec: AugmentSpec, *, image_size: int, key: tuple[int, int, int]) -> tuple[int, int]:
    """Draw side in pixels and OpenCV's interpolation of all samples of an update; ``key``: (seed, epoch, update)."""
    sides = sides_of(spec, image_size=image_size)
    if len(sides) == len(spec.interpolations) == 1:
        return sides[0], METHODS[spec.interpolations[0]]
    # Drawn by update and not by sample: all samples of a micro batch need one side.
    rng = np.random.Generator(np.random.PCG64([*key, SHARED]))
    side = sides[int(rng.integers(len(sides)))]
    return side, METHODS[spec.interpolations[int(rng.integers(len(spec.interpolations)))]]


def expand(rng: np.random.Generator, spec: ExpandSpec, window: Window) -> Window:
    """Return a larger window of the same shape, with ``window`` at a random position in it."""
    if rng.random() >= spec.probability:
        return window
    ratio = rng.uniform(1.0, spec.ratio)
    width, height = int(window.width * ratio), int(window.height * ratio)
    left, top = rng.integers(width - window.width + 1), rng.integers(height - window.height + 1)
    return Window(window.left - int(left), window.top - int(top), width, height)


def crop_window(rng: np.random.Generator, spec: CropSpec, window: Window, boxes_N4: NDArray[np.float64]) -> Window:
    """Return a part of ``window`` that overlaps some box by one of the thresholds and holds the centre of at least one.

    The window stays unchanged if no threshold can be met, if there are no boxes, or if ``allow_no_crop`` is drawn.
    """
    if not len(boxes_N4):
        return window
    choices: list[float | None] = [*spec.thresholds]
    if spec.allow_no_crop:
        choices.append(None)
    # Drawn without repetition: a threshold that could not be met is not tried again.
    for number in rng.permutation(len(choices)).tolist():
        threshold = choices[number]
        if threshold is None:
            return window
        crops_A4 = _random_crops(rng, spec, window)
        fits_A = (_iou_AN(crops_A4, boxes_N4).max(axis=1) >= threshold) & centres_inside(crops_A4, boxes_N4).any(axis=1)
        if fits_A.any():
            left, top, right, bottom = crops_A4[int(fits_A.argmax())].astype(int).tolist()
            return Window(left, top, right - left, bottom - top)
    return window


def _random_crops(rng: np.random.Generator, spec: CropSpec, window: Window) -> NDArray[np.float64]:
    """Draw (A, 4) xyxy crops, whole pixels inside ``window``."""
    scale = rng.uniform(spec.scaling[0], spec.scaling[1], spec.num_attempts)
    area = scale * scale
    # An aspect ratio between the crop's area and its inverse keeps both sides within those of the window.
    low, high = np.maximum(spec.aspect_ratio[0], area), np.minimum(spec.aspect_ratio[1], 1 / np.maximum(area, 1e-9))
    root = np.sqrt(low + (high - low) * rng.random(spec.num_attempts))
    width = np.clip((window.width * scale * root).astype(int), 1, window.width)
    height = np.clip((window.height * scale / root).astype(int), 1, window.height)
    left = window.left + rng.integers(window.width - width + 1)
    top = window.top + rng.integers(window.height - height + 1)
    return np.stack([left, top, left + width, top + height], axis=1).astype(np.float64)


def _iou_AN(crops_A4: NDArray[np.float64], boxes_N4: NDArray[np.float64]) -> NDArray[np.float64]:
    crops, boxes = crops_A4[:, None], boxes_N4[None]
    shared = np.minimum(crops[..., 2:], boxes[..., 2:]) - np.maximum(crops[..., :2], boxes[..., :2])
    inter = shared.clip(0).prod(axis=-1)
    areas = [(x[..., 2:] - x[..., :2]).prod(axis=-1) for x in (crops, boxes)]
    iou: NDArray[np.float64] = inter / (areas[0] + areas[1] - inter)
    return iou


def centres_inside(windows_A4: NDArray[np.float64], boxes_N4: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return (A, N) whether the centre of a box lies strictly inside a window."""
    centres, windows = (boxes_N4[:, :2] + boxes_N4[:, 2:])[None] / 2, windows_A4[:, None]
    inside: NDArray[np.bool_] = np.all((windows[..., :2] < centres) & (centres < windows[..., 2:]), axis=-1)
    return inside


class Stretcher:
    """Draw augmented images. All randomness comes from the generator passed to each call."""

    def __init__(self, images: Images, spec: AugmentSpec) -> None:
        self._images = images
        self._spec = spec

    def draw(self, rng: np.random.Generator, index: int, out: NDArray[np.uint8], *, method: int) -> NDArray[np.float32]:
        """Fill ``out`` (S, S, 3) RGB with sample ``index``, augmented, resized by OpenCV's interpolation ``method``.

        Returns (N, 5) rows ``[class, xc, yc, w, h]``, normalised.

        Raises:
            DataError: the image is unreadable; it is named.

        """
        spec = self._spec
        width, height = self._images.original_size(index)
        fractions, labels = self._images.boxes(index)
        boxes = fractions * np.array([width, height] * 2)
        change = None if spec.distort is None else drawn_distortion(rng, spec.distort)
        # Expansion and crop only choose the visible window of the image's plane: no larger canvas is painted.
        window = Window(0, 0, width, height)
        if spec.expand is not None:
            window = expand(rng, spec.expand, window)
        if spec.crop is not None:
            window = crop_window(rng, spec.crop, window, boxes)
        scales, shifts = self._paint(index, window, out, change, method)
        before = boxes * scales + shifts
        after = np.clip(before, 0.0, float(len(out)))
        # A box whose centre was cropped away shows too little of its object to be a target, as in SSD (section 2.2).
        keep = centres_inside(window.xyxy[None], boxes)[0] & survives(before, after)
        return finish(rng, spec, (after[keep], labels[keep]), out, edge_px=0.0)

    def _paint(
        self, index: int, window: Window, out: NDArray[np.uint8], change: Change | None, method: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Draw the visible part of the image to its place in ``out``; return (4,) scales and shifts from image to
        output positions."""
        width, height = self._images.original_size(index)
        side = len(out)
        axes = [
            Axis(side / window.width, -window.left * side / window.width),
            Axis(side / window.height, -window.top * side / window.height),
        ]
        x, y = axes[0].output_range(0, width, width, side), axes[1].output_range(0, height, height, side)
        if (x, y) != ((0, side), (0, side)):
            out[...] = self._fill()
        if x[1] <= x[0] or y[1] <= y[0]:  # the image is thinner than a pixel, and so are its boxes
            return np.zeros(4), np.zeros(4)
        kept_width, kept_height = self._images.size(index)
        left, right, scale_x, shift_x = axes[0].source(x, 0, width, kept_width)
        top, bottom, scale_y, shift_y = axes[1].source(y, 0, height, kept_height)
        # Colours are distorted after the resize, when there are fewest pixels; but by ``enhance`` before
        # it, because its contrast depends on the whole image. The fill's colour is never distorted.
        is_whole = self._spec.distort is not None and self._spec.distort.form == "enhance"
        image = self._images.load(index, rows=None if is_whole else bottom)
        if change is not None and is_whole:
            # A copy, since the image may lie in the cache, where all loader processes read it.
            change(image := image.copy())
        region = out[y[0] : y[1], x[0] : x[1]]
        cv2.resize(image[top:bottom, left:right], (x[1] - x[0], y[1] - y[0]), dst=region, interpolation=method)
        if change is not None and not is_whole:
            change(region)
        return np.array([scale_x, scale_y] * 2), np.array([shift_x, shift_y] * 2)

    def _fill(self) -> NDArray[np.uint8]:
        colour = [0.0] * 3 if self._spec.expand is None else self._spec.expand.fill
        return np.rint(colour).astype(np.uint8)
