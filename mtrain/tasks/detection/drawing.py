"""Draw boxes for people: labelled boxes, grids of images, and ground truth beside predictions.

Images are uint8 (H, W, 3) RGB; boxes are xyxy in their pixels.
"""

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mtrain.data.images.drawing import Pixels, grid, put_text, spread, text_size
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.image_cache import decode_annotated
from mtrain.tasks.detection.source import DetectionSource

SHOWN_SCORE = 0.25
"""Smallest score of a prediction that is drawn beside the truth."""
COMPARED = 8
"""Most images of a comparison."""


def class_colour(label: int) -> tuple[int, int, int]:
    """Return a bright RGB colour."""
    # Steps of the golden angle around the hue circle: neighbouring labels differ strongly, for any number of classes.
    red, green, blue = colorsys.hsv_to_rgb((0.02 + label * 0.381966) % 1.0, 0.85, 1.0)
    return int(red * 255), int(green * 255), int(blue * 255)


def draw_boxes(
    image: Pixels,
    boxes: NDArray[Any],
    labels: Sequence[int] | NDArray[Any],
    class_names: Sequence[str],
    *,
    scores: Sequence[float] | NDArray[Any] | None = None,
) -> Pixels:
    """Return a copy of ``image`` with boxes (N, 4), each labelled with its class and, with ``scores``, a
    percentage."""
    canvas = image.copy()
    side = max(canvas.shape[:2])
    thickness = max(1, round(side / 400))
    scale = max(0.35, side / 1400)
    for i, (box, label) in enumerate(zip(boxes, labels, strict=True)):
        colour = class_colour(int(label))
        x1, y1, x2, y2 = (round(float(value)) for value in box)
        cv2.rectangle(canvas, (x1, y1), (x2, y2), colour, thickness, cv2.LINE_AA)
        text = class_names[int(label)] + ("" if scores is None else f" {float(scores[i]):.0%}")
        _label(canvas, text, (x1, y1), colour=colour, scale=scale)
    return canvas


def _label(canvas: Pixels, text: str, corner: tuple[int, int], *, colour: tuple[int, int, int], scale: float) -> None:
    width, height, baseline = text_size(text, scale=scale)
    x = min(max(corner[0], 0), max(canvas.shape[1] - width - 2, 0))
    # Above the box, but inside of it where the image ends there.
    y = corner[1] if corner[1] - height - baseline >= 0 else corner[1] + height + baseline
    cv2.rectangle(canvas, (x, y - height - baseline), (x + width + 2, y), colour, cv2.FILLED)
    # The luma of ITU-R BT.601, so that text is readable on yellow as on blue.
    is_dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 140
    text_colour = (255, 255, 255) if is_dark else (0, 0, 0)
    put_text(canvas, text, (x + 1, y - baseline // 2 - 1), scale=scale, colour=text_colour)


def annotate(annotations: Annotations, index: int) -> Pixels:
    """Draw one image of a split with its training boxes."""
    sample = annotations.samples[index]
    boxes, labels = sample.targets
    return draw_boxes(decode_annotated(sample), boxes, labels, annotations.class_names)


def annotations_grid(annotations: Annotations, *, limit: int = 16) -> Pixels:
    """Draw up to ``limit`` images, spread evenly over the split, with their boxes."""
    indices = spread(len(annotations.samples), limit)
    captions = [_caption(annotations, i) for i in indices]
    images = [annotate(annotations, i) for i in indices]
    return grid(images, columns=min(4, len(images)), captions=captions)


def inputs_grid(source: DetectionSource, class_names: Sequence[str], *, limit: int = 16) -> Pixels:
    """Draw up to ``limit`` samples as the network receives them in epoch 0, spread evenly over the split, four a row."""
    images, captions = [], []
    for update, index in enumerate(spread(len(source), limit)):
        # Each as a sample of another update, so that all sides and interpolations can be seen.
        item = source.sample(0, index, update=update)
        assert item.image is not None
        side = len(item.image)
        centres, sizes = item.targets[:, 1:3] * side, item.targets[:, 3:] * side
        boxes = np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1)
        images.append(draw_boxes(item.image, boxes, item.targets[:, 0].astype(int), class_names))
        captions.append(f"{Path(source.describe(index)).name[-24:]}  {side} px  {len(boxes)} boxes")
    return grid(images, columns=min(4, len(images)), captions=captions)


def _caption(annotations: Annotations, index: int) -> str:
    sample = annotations.samples[index]
    return f"{sample.path.name[-32:]}  {len(sample.targets[0])} boxes"


def comparison(annotations: Annotations, predictions: Mapping[int, NDArray[Any]]) -> Pixels:
    """Draw ground truth (left) beside predictions (right) for some images, two pairs a row.

    ``predictions``: by sample index (K, 6) x1, y1, x2, y2 in pixels of the image, score, class index, as
    :func:`mtrain.tasks.detection.evaluator.merge` returns them; those below ``SHOWN_SCORE`` are not drawn.
    """
    indices = sorted(predictions)
    images: list[Pixels] = []
    captions: list[str] = []
    for index in (indices[place] for place in spread(len(indices), COMPARED)):
        rows = predictions[index]
        rows = rows[rows[:, 4] >= SHOWN_SCORE]
        image = decode_annotated(annotations.samples[index])
        rows = rows[np.argsort(rows[:, 4])]  # draw the highest score last, on top
        drawn = draw_boxes(image, rows[:, :4], rows[:, 5].astype(int), annotations.class_names, scores=rows[:, 4])
        images += [annotate(annotations, index), drawn]
        captions += [f"truth: {_caption(annotations, index)}", f"found: {len(rows)} with a score >= {SHOWN_SCORE:g}"]
    return grid(images, columns=min(4, max(2, len(images))), cell_px=400, captions=captions)
