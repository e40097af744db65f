"""Draw pictures for people: arrange them in a captioned grid and write them to files, whatever the task.

Pictures are uint8 (H, W, 3) RGB.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from mtrain.errors import DataError

Picture: TypeAlias = NDArray[np.uint8]
_FONT = cv2.FONT_HERSHEY_SIMPLEX
_GAP_PX = 4
_CAPTION_PX = 20


def fit(picture: Picture, *, width: int, height: int) -> Picture:
    """Return ``picture`` scaled to fit (width, height) with its aspect ratio, on a grey background."""
    factor = min(width / picture.shape[1], height / picture.shape[0])
    size = (max(1, round(picture.shape[1] * factor)), max(1, round(picture.shape[0] * factor)))
    scaled = cv2.resize(picture, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    canvas = np.full((height, width, 3), 60, dtype=np.uint8)
    offset_x, offset_y = (width - size[0]) // 2, (height - size[1]) // 2
    canvas[offset_y : offset_y + size[1], offset_x : offset_x + size[0]] = scaled
    return canvas


def grid(pictures: Sequence[Picture], *, columns: int, cell_px: int = 320, captions: Sequence[str] = ()) -> Picture:
    """Arrange pictures in rows of ``columns``, with an optional caption above each. A cell is ``cell_px`` wide and
    three quarters as high (square when no picture is wider than high)."""
    square_cells = all(picture.shape[0] >= picture.shape[1] for picture in pictures)
    cell_height = cell_px if square_cells else cell_px * 3 // 4
    caption_height = _CAPTION_PX if captions else 0
    rows = -(-len(pictures) // columns)
    pitch_x, pitch_y = cell_px + _GAP_PX, cell_height + caption_height + _GAP_PX
    canvas = np.full((rows * pitch_y + _GAP_PX, columns * pitch_x + _GAP_PX, 3), 255, dtype=np.uint8)
    for i, picture in enumerate(pictures):
        x, y = _GAP_PX + (i % columns) * pitch_x, _GAP_PX + (i // columns) * pitch_y
        if captions:
            cv2.putText(canvas, captions[i], (x, y + _CAPTION_PX - 6), _FONT, 0.42, (0, 0, 0), 1, cv2.LINE_AA)
        canvas[y + caption_height : y + caption_height + cell_height, x : x + cell_px] = fit(
            picture, width=cell_px, height=cell_height
        )
    return canvas


def encoded(picture: Picture, suffix: str) -> bytes:
    """Return RGB bytes as the content of a picture file, whose suffix decides the format as in ``save_picture``.

    Raises:
        cv2.error: the suffix is unknown.
    """
    if suffix.lower() in (".jpg", ".jpeg"):
        return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality=90, colorspace="RGB"))
    return bytes(cv2.imencode(suffix, cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))[1].tobytes())


def save_picture(picture: Picture, path: Path) -> None:
    """Write RGB bytes; the suffix decides the format: JPEG (quality 90), PNG, or another one that OpenCV writes.

    Raises:
        DataError: the file cannot be written, or the suffix is unknown.

    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture, path.suffix))
    except (OSError, cv2.error) as error:
        raise DataError(f"{path}: cannot be written ({' '.join(str(error).split())}); expected .jpg or .png") from error
