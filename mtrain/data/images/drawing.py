"""Draw images for people: arrange them in a captioned grid and write them to files, whatever the task.

Images are uint8 (H, W, 3) RGB.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from mtrain.errors import DataError
from mtrain.spec import outputs
from mtrain.spec.terminal import one_line

Pixels: TypeAlias = NDArray[np.uint8]
_FONT = cv2.FONT_HERSHEY_SIMPLEX
MAX_TEXT = 200
"""Most characters of a line that are written into an image."""
_GAP_PX = 4
_CAPTION_PX = 20


def fit(image: Pixels, *, width: int, height: int) -> Pixels:
    """Return ``image`` scaled to fit (width, height) with its aspect ratio, on a grey background."""
    factor = min(width / image.shape[1], height / image.shape[0])
    size = (max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor)))
    scaled = cv2.resize(image, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    canvas = np.full((height, width, 3), 60, dtype=np.uint8)
    offset_x, offset_y = (width - size[0]) // 2, (height - size[1]) // 2
    canvas[offset_y : offset_y + size[1], offset_x : offset_x + size[0]] = scaled
    return canvas


def grid(images: Sequence[Pixels], *, columns: int, cell_px: int = 320, captions: Sequence[str] = ()) -> Pixels:
    """Arrange images in rows of ``columns``, with an optional caption above each. A cell is ``cell_px`` wide and
    three quarters as high (square when no image is wider than high)."""
    square_cells = all(image.shape[0] >= image.shape[1] for image in images)
    cell_height = cell_px if square_cells else cell_px * 3 // 4
    caption_height = _CAPTION_PX if captions else 0
    rows = -(-len(images) // columns)
    pitch_x, pitch_y = cell_px + _GAP_PX, cell_height + caption_height + _GAP_PX
    canvas = np.full((rows * pitch_y + _GAP_PX, columns * pitch_x + _GAP_PX, 3), 255, dtype=np.uint8)
    for i, image in enumerate(images):
        x, y = _GAP_PX + (i % columns) * pitch_x, _GAP_PX + (i // columns) * pitch_y
        if captions:
            put_text(canvas, captions[i], (x, y + _CAPTION_PX - 6), scale=0.42)
        canvas[y + caption_height : y + caption_height + cell_height, x : x + cell_px] = fit(
            image, width=cell_px, height=cell_height
        )
    return canvas


def spread(count: int, limit: int) -> list[int]:
    """Return up to ``limit`` of the numbers from 0 to ``count`` - 1, spread evenly."""
    return [int(place) for place in np.linspace(0, count - 1, min(count, limit))]


def put_text(
    canvas: Pixels, text: str, corner: tuple[int, int], *, scale: float, colour: tuple[int, int, int] = (0, 0, 0)
) -> None:
    """Write one line into ``canvas`` from its lower left ``corner``. The text may be anybody's, such as a file name."""
    # OpenCV ends the process where text is not UTF-8; ``one_line`` writes such letters as escapes.
    cv2.putText(canvas, one_line(text, limit=MAX_TEXT), corner, _FONT, scale, colour, 1, cv2.LINE_AA)


def text_size(text: str, *, scale: float) -> tuple[int, int, int]:
    """Return width, height and depth below the base line, in pixels, of what ``put_text`` writes."""
    (width, height), baseline = cv2.getTextSize(one_line(text, limit=MAX_TEXT), _FONT, scale, 1)
    return width, height, baseline


def encode(image: Pixels, suffix: str) -> bytes:
    """Return RGB bytes as the content of an image file, whose suffix decides the format as in ``save_image``.

    Raises:
        cv2.error: the suffix is unknown.
    """
    if suffix.lower() in (".jpg", ".jpeg"):
        return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=90, colorspace="RGB"))
    return bytes(cv2.imencode(suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1].tobytes())


def save_image(image: Pixels, path: Path) -> None:
    """Write RGB bytes; the suffix decides the format: JPEG (quality 90), PNG, or another one that OpenCV writes.

    Raises:
        DataError: the file cannot be written, or the suffix is unknown.

    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        outputs.write_bytes(path, encode(image, path.suffix))
    except (OSError, cv2.error) as error:
        raise DataError(f"{path}: cannot be written ({' '.join(str(error).split())}); expected .jpg or .png") from error
