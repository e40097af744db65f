"""Draw labelled images for people: a grid of images, each with its class above it.

Images are uint8 (H, W, 3) RGB.
"""

from collections.abc import Mapping
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Source
from mtrain.data.images.drawing import Pixels, grid, spread
from mtrain.tasks.classification.labels import LabelledImages

_CELL_PX = 120
_COLUMNS = 8
_BORDER_PX = 4
_RIGHT, _WRONG = (60, 160, 60), (220, 40, 40)


def caption_of(best: tuple[str, float] | None, *, confidence: float) -> str:
    """Return the caption of an image: its most probable class and the probability, if it reaches ``confidence``."""
    return f"no class with a score >= {confidence:g}" if best is None else f"{best[0]} {best[1]:.0%}"


def comparison(split: LabelledImages, predictions: Mapping[int, NDArray[Any]], *, limit: int = 48) -> Pixels:
    """Draw up to ``limit`` images with their true and predicted class, mistakes first.

    ``predictions``: probabilities (C,) by sample index. The frame is green where both are the same, red elsewhere.
    """
    predicted = {index: int(np.argmax(probabilities)) for index, probabilities in sorted(predictions.items())}
    wrong = [index for index, label in predicted.items() if label != split.labels[index]]
    right = [index for index, label in predicted.items() if label == split.labels[index]]
    # Mistakes say most and come first, but at most half of the places are theirs: the drawing also shows what is right.
    shown = [wrong[place] for place in spread(len(wrong), limit // 2)]
    shown += [right[place] for place in spread(len(right), limit - len(shown))]
    images, captions = [], []
    for index in shown:
        true_label, predicted_label = int(split.labels[index]), predicted[index]
        images.append(_frame(split.images[index], _RIGHT if true_label == predicted_label else _WRONG))
        captions.append(
            f"{split.class_names[true_label]} as {split.class_names[predicted_label]}  "
            f"{predictions[index][predicted_label]:.0%}"
        )
    return grid(images, columns=min(_COLUMNS, len(images)), cell_px=_CELL_PX, captions=captions)


def labelled_grid(split: LabelledImages, *, limit: int) -> Pixels:
    """Draw up to ``limit`` images, spread evenly over the split, each with its class."""
    indices = spread(len(split), limit)
    # The end of a path tells images apart; a cell has no room for its beginning, which most of them share.
    captions = [f"{split.class_names[split.labels[i]]}  {split.origins[i][-12:]}" for i in indices]
    images = [_enlarge(split.images[i], _CELL_PX) for i in indices]
    return grid(images, columns=min(_COLUMNS, len(indices)), cell_px=_CELL_PX, captions=captions)


def inputs_grid(source: Source, split: LabelledImages, *, limit: int) -> Pixels:
    """Draw up to ``limit`` samples, spread evenly over the split, as the network receives them in epoch 0."""
    items = [source.sample(0, index) for index in spread(len(source), limit)]
    captions = [f"{split.class_names[item.label]}  {split.origins[item.index][-12:]}" for item in items]
    images = [_enlarge(item.image, _CELL_PX) for item in items]
    return grid(images, columns=min(_COLUMNS, len(items)), cell_px=_CELL_PX, captions=captions)


def _enlarge(image: Pixels, side: int) -> Pixels:
    """Scale the longer side to ``side``."""
    factor = side / max(image.shape[:2])
    # Nearest neighbours, so that the pixels of a small image stay visible; areas, so that a large one has no moire.
    method = cv2.INTER_NEAREST if factor > 1 else cv2.INTER_AREA
    size = (max(round(image.shape[1] * factor), 1), max(round(image.shape[0] * factor), 1))
    return np.asarray(cv2.resize(image, size, interpolation=method), dtype=np.uint8)


def _frame(image: Pixels, colour: tuple[int, int, int]) -> Pixels:
    inner = _enlarge(image, _CELL_PX - 2 * _BORDER_PX)
    edges = (_BORDER_PX,) * 4
    return np.asarray(cv2.copyMakeBorder(inner, *edges, cv2.BORDER_CONSTANT, value=colour), dtype=np.uint8)
