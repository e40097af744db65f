"""Draw masks for people, in the colours of Pascal VOC over the picture.

Pictures are uint8 (H, W, 3) RGB.
"""

from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Source
from mtrain.data.images.drawing import Picture, grid
from mtrain.data.images.indexed import IGNORED, colours
from mtrain.tasks.segmentation.evaluator import expanded
from mtrain.tasks.segmentation.masks import MaskedPictures

_CELL_PX = 240
_OPACITY = 0.6


def overlay(picture: Picture, classes: NDArray[np.uint8]) -> Picture:
    """Colour each pixel by its class; class 0 and pixels without a class stay as they are."""
    shown = (classes != 0) & (classes != IGNORED)
    mixed = picture.astype(np.float32)
    mixed[shown] = (1 - _OPACITY) * mixed[shown] + _OPACITY * colours()[classes[shown]]
    return np.rint(mixed).astype(np.uint8)


def comparison(split: MaskedPictures, predictions: Mapping[int, Mapping[str, Any]]) -> Picture:
    """Draw the pictures whose prediction was kept, each beside its mask and its predicted classes."""
    pictures, captions = [], []
    for index, pairs in sorted(predictions.items()):
        if not pairs["drawn"]:
            continue
        picture = split.picture(index)
        size_wh = (picture.shape[1], picture.shape[0])
        predicted = np.asarray(expanded(pairs["drawn"], size_wh))
        pictures += [picture, overlay(picture, split.mask(index, size_wh)), overlay(picture, predicted)]
        captions += [split.pictures[index].name[-30:], "mask", "predicted"]
    return grid([_enlarged(picture) for picture in pictures], columns=6, cell_px=_CELL_PX, captions=captions)


def masks_grid(split: MaskedPictures, *, limit: int) -> Picture:
    """Draw up to ``limit`` pictures, spread evenly over the split, each with its mask."""
    pictures, captions = [], []
    for index in _spread(len(split), limit):
        picture = split.picture(index)
        pictures.append(_enlarged(overlay(picture, split.mask(index, (picture.shape[1], picture.shape[0])))))
        captions.append(split.pictures[index].name[-30:])
    return grid(pictures, columns=min(4, len(pictures)), cell_px=_CELL_PX, captions=captions)


def inputs_grid(source: Source, split: MaskedPictures, *, limit: int) -> Picture:
    """Draw up to ``limit`` samples, spread evenly over the split, as the network receives them in epoch 0."""
    indices = _spread(len(source), limit)
    samples = [source.sample(0, index).pixels for index in indices]
    pictures = [_enlarged(overlay(pixels[..., :3], pixels[..., 3])) for pixels in samples]
    captions = [split.pictures[index].name[-30:] for index in indices]
    return grid(pictures, columns=min(4, len(pictures)), cell_px=_CELL_PX, captions=captions)


def _spread(count: int, limit: int) -> list[int]:
    return sorted({int(place) for place in np.linspace(0, count - 1, min(count, limit))})


def _enlarged(picture: Picture) -> Picture:
    """Enlarge a small picture by a whole number, so that its pixels stay visible."""
    factor = max(_CELL_PX // max(picture.shape[:2]), 1)
    size = (picture.shape[1] * factor, picture.shape[0] * factor)
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_NEAREST), dtype=np.uint8)
