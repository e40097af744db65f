"""Draw masks for people, in the colours of Pascal VOC over the image.

Images are uint8 (H, W, 3) RGB.
"""

from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Source
from mtrain.data.images.drawing import Pixels, grid, spread
from mtrain.data.images.indexed import IGNORED, colours
from mtrain.tasks.segmentation.evaluator import expand
from mtrain.tasks.segmentation.masks import MaskedImages

_CELL_PX = 240
_OPACITY = 0.6


def overlay(image: Pixels, classes: NDArray[np.uint8]) -> Pixels:
    """Colour each pixel by its class; class 0 and pixels without a class stay as they are."""
    shown = (classes != 0) & (classes != IGNORED)
    mixed = image.astype(np.float32)
    mixed[shown] = (1 - _OPACITY) * mixed[shown] + _OPACITY * colours()[classes[shown]]
    return np.rint(mixed).astype(np.uint8)


def comparison(split: MaskedImages, predictions: Mapping[int, Mapping[str, Any]]) -> Pixels:
    """Draw the images whose prediction was kept, each beside its mask and its predicted classes."""
    images, captions = [], []
    for index, pairs in sorted(predictions.items()):
        if not pairs["drawn"]:
            continue
        image = split.image(index)
        size_wh = (image.shape[1], image.shape[0])
        predicted = np.asarray(expand(pairs["drawn"], size_wh))
        images += [image, overlay(image, split.mask(index, size_wh)), overlay(image, predicted)]
        captions += [split.images[index].name[-30:], "mask", "predicted"]
    return grid([_enlarge(image) for image in images], columns=6, cell_px=_CELL_PX, captions=captions)


def masks_grid(split: MaskedImages, *, limit: int) -> Pixels:
    """Draw up to ``limit`` images, spread evenly over the split, each with its mask."""
    images, captions = [], []
    for index in spread(len(split), limit):
        image = split.image(index)
        images.append(_enlarge(overlay(image, split.mask(index, (image.shape[1], image.shape[0])))))
        captions.append(split.images[index].name[-30:])
    return grid(images, columns=min(4, len(images)), cell_px=_CELL_PX, captions=captions)


def inputs_grid(source: Source, split: MaskedImages, *, limit: int) -> Pixels:
    """Draw up to ``limit`` samples, spread evenly over the split, as the network receives them in epoch 0."""
    indices = spread(len(source), limit)
    samples = [source.sample(0, index).pixels for index in indices]
    images = [_enlarge(overlay(pixels[..., :3], pixels[..., 3])) for pixels in samples]
    captions = [split.images[index].name[-30:] for index in indices]
    return grid(images, columns=min(4, len(images)), cell_px=_CELL_PX, captions=captions)


def _enlarge(image: Pixels) -> Pixels:
    """Enlarge a small image by a whole number, so that its pixels stay visible."""
    factor = max(_CELL_PX // max(image.shape[:2]), 1)
    size = (image.shape[1] * factor, image.shape[0] * factor)
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_NEAREST), dtype=np.uint8)
