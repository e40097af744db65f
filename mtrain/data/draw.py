"""Pictures for people: boxes with names on them, pictures in a grid, ground truth beside predictions.

Pictures are uint8 (H, W, 3) RGB; boxes are xyxy in their pixels.
"""

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from mtrain.core.errors import DataError
from mtrain.data.decode import decode_annotated
from mtrain.data.sample import Annotations
from mtrain.data.source import DetectionSource

Picture: TypeAlias = NDArray[np.uint8]
_FONT = cv2.FONT_HERSHEY_SIMPLEX
_GAP_PX = 4
_CAPTION_PX = 20


def class_colour(label: int) -> tuple[int, int, int]:
    """A bright RGB colour; neighbouring labels differ strongly (steps of the golden angle around the hue circle)."""
    red, green, blue = colorsys.hsv_to_rgb((0.02 + label * 0.381966) % 1.0, 0.85, 1.0)
    return int(red * 255), int(green * 255), int(blue * 255)


def draw_boxes(
    picture: Picture,
    boxes: NDArray[Any],
    labels: Sequence[int] | NDArray[Any],
    class_names: Sequence[str],
    *,
    scores: Sequence[float] | NDArray[Any] | None = None,
) -> Picture:
    """A copy of ``picture`` with boxes (N, 4) and a name, with ``scores`` also a percentage, on each."""
    canvas = picture.copy()
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


def _label(canvas: Picture, text: str, corner: tuple[int, int], *, colour: tuple[int, int, int], scale: float) -> None:
    (width, height), below = cv2.getTextSize(text, _FONT, scale, 1)
    x = min(max(corner[0], 0), max(canvas.shape[1] - width - 2, 0))
    y = corner[1] if corner[1] - height - below >= 0 else corner[1] + height + below
    cv2.rectangle(canvas, (x, y - height - below), (x + width + 2, y), colour, cv2.FILLED)
    dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 140
    ink = (255, 255, 255) if dark else (0, 0, 0)
    cv2.putText(canvas, text, (x + 1, y - below // 2 - 1), _FONT, scale, ink, 1, cv2.LINE_AA)


def fit(picture: Picture, *, width: int, height: int) -> Picture:
    """``picture`` scaled to fit (width, height), its proportions kept, grey around it."""
    factor = min(width / picture.shape[1], height / picture.shape[0])
    size = (max(1, round(picture.shape[1] * factor)), max(1, round(picture.shape[0] * factor)))
    small = cv2.resize(picture, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    canvas = np.full((height, width, 3), 60, dtype=np.uint8)
    left, top = (width - size[0]) // 2, (height - size[1]) // 2
    canvas[top : top + size[1], left : left + size[0]] = small
    return canvas


def grid(pictures: Sequence[Picture], *, columns: int, cell_px: int = 320, captions: Sequence[str] = ()) -> Picture:
    """Pictures in rows of ``columns``, each fitted into a cell ``cell_px`` wide and three quarters as high (square
    when all are square), with an optional caption above."""
    square = all(picture.shape[0] >= picture.shape[1] for picture in pictures)
    cell_height = cell_px if square else cell_px * 3 // 4
    above = _CAPTION_PX if captions else 0
    rows = -(-len(pictures) // columns)
    pitch_x, pitch_y = cell_px + _GAP_PX, cell_height + above + _GAP_PX
    canvas = np.full((rows * pitch_y + _GAP_PX, columns * pitch_x + _GAP_PX, 3), 255, dtype=np.uint8)
    for i, picture in enumerate(pictures):
        left, top = _GAP_PX + (i % columns) * pitch_x, _GAP_PX + (i // columns) * pitch_y
        if captions:
            cv2.putText(canvas, captions[i], (left, top + _CAPTION_PX - 6), _FONT, 0.42, (0, 0, 0), 1, cv2.LINE_AA)
        canvas[top + above : top + above + cell_height, left : left + cell_px] = fit(
            picture, width=cell_px, height=cell_height
        )
    return canvas


def annotated(annotations: Annotations, index: int) -> Picture:
    """One picture of a split with its training boxes."""
    sample = annotations.samples[index]
    boxes, labels = sample.targets
    return draw_boxes(decode_annotated(sample), boxes, labels, annotations.class_names)


def annotations_grid(annotations: Annotations, *, limit: int = 16, columns: int = 4, cell_px: int = 320) -> Picture:
    """Up to ``limit`` pictures, spread evenly over the split, with their boxes."""
    count = min(limit, len(annotations.samples))
    chosen = [int(i) for i in np.linspace(0, len(annotations.samples) - 1, count)]
    captions = [_caption(annotations, i) for i in chosen]
    pictures = [annotated(annotations, i) for i in chosen]
    return grid(pictures, columns=min(columns, count), cell_px=cell_px, captions=captions)


def inputs_grid(source: DetectionSource, class_names: Sequence[str], *, limit: int = 16, cell_px: int = 320) -> Picture:
    """Up to ``limit`` samples, spread evenly over the split, as the network is given them in epoch 0, four a row.

    Each is drawn as a sample of another update, so that all sides and interpolations can be seen.
    """
    count = min(limit, len(source))
    pictures, captions = [], []
    for update, index in enumerate(np.linspace(0, len(source) - 1, count).astype(int).tolist()):
        item = source.sample(0, index, update=update)
        assert item.image is not None
        side = len(item.image)
        centres, sizes = item.targets[:, 1:3] * side, item.targets[:, 3:] * side
        boxes = np.concatenate([centres - sizes / 2, centres + sizes / 2], axis=1)
        pictures.append(draw_boxes(item.image, boxes, item.targets[:, 0].astype(int), class_names))
        captions.append(f"{Path(source.describe(index)).name[-24:]}  {side} px  {len(boxes)} boxes")
    return grid(pictures, columns=min(4, count), cell_px=cell_px, captions=captions)


def _caption(annotations: Annotations, index: int) -> str:
    sample = annotations.samples[index]
    return f"{sample.path.name[-32:]}  {len(sample.targets[0])} boxes"


def comparison(
    annotations: Annotations,
    found: Mapping[int, NDArray[Any]],
    *,
    threshold: float = 0.25,
    limit: int = 8,
    cell_px: int = 400,
) -> Picture:
    """Ground truth (left of each pair) beside predictions (right) for up to ``limit`` pictures, two pairs a row.

    ``found``: by sample index (K, 6) x1, y1, x2, y2 in pixels of the picture, score, class index, as
    :func:`mtrain.data.evaluation.merge` gives them; those below ``threshold`` are not drawn.
    """
    indices = sorted(found)
    chosen = [indices[int(i)] for i in np.linspace(0, len(indices) - 1, min(limit, len(indices)))]
    pictures: list[Picture] = []
    captions: list[str] = []
    for index in chosen:
        rows = found[index]
        rows = rows[rows[:, 4] >= threshold]
        picture = decode_annotated(annotations.samples[index])
        order = np.argsort(rows[:, 4])  # the surest last, on top
        rows = rows[order]
        drawn = draw_boxes(picture, rows[:, :4], rows[:, 5].astype(int), annotations.class_names, scores=rows[:, 4])
        pictures += [annotated(annotations, index), drawn]
        captions += [f"truth: {_caption(annotations, index)}", f"found: {len(rows)} with a score >= {threshold:g}"]
    return grid(pictures, columns=min(4, max(2, len(pictures))), cell_px=cell_px, captions=captions)


def save_picture(picture: Picture, path: Path) -> None:
    """Write RGB bytes; the suffix decides: JPEG (quality 90), or PNG and what else OpenCV writes.

    Raises:
        DataError: the file cannot be written, or the suffix is unknown.

    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in (".jpg", ".jpeg"):
            data = simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality=90, colorspace="RGB")
        else:
            data = cv2.imencode(path.suffix, cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))[1].tobytes()
        path.write_bytes(data)
    except (OSError, cv2.error) as error:
        raise DataError(f"{path}: cannot be written ({' '.join(str(error).split())}); expected .jpg or .png") from error
