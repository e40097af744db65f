"""The cheap look at a picture file: its size as displayed and whether it is whole. Nothing is decompressed.

What a file is, its first bytes say; the suffix is not looked at.
"""

import io
import struct
from pathlib import Path

from mtrain.core.errors import DataError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".jpe", ".mpo", ".png", ".tif", ".tiff", ".webp"})
"""Lower-case suffixes by which the pictures of a folder are found."""

JPEG = b"\xff\xd8"
PNG = b"\x89PNG\r\n\x1a\n"
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END = b"\xff\xd9"
_ORIENTATION = 0x0112


def read_jpeg_header(data: bytes) -> tuple[int, int, int, int]:
    """Stored width and height, EXIF orientation (1 if none), and where the compressed data starts.

    Raises:
        ValueError: the header is damaged.

    """
    position, orientation, size = 2, 1, (0, 0)
    while position + 4 <= len(data):
        if data[position] != 0xFF:
            raise ValueError("damaged JPEG header")
        marker = data[position + 1]
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD8:
            position += 1 if marker == 0xFF else 2
            continue
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        if marker in _SIZE_MARKERS:
            height, width = struct.unpack_from(">HH", data, position + 5)
            size = (width, height)
        elif marker == 0xE1 and data[position + 4 : position + 10] == b"Exif\0\0":
            orientation = _exif_orientation(data[position + 10 : position + 2 + length])
        elif marker == 0xDA:
            if not all(size):
                raise ValueError("JPEG without a size")
            return (*size, orientation, position)
        position += 2 + length
    raise ValueError("JPEG ends within its header")


def _exif_orientation(tiff: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 10:
        return 1
    start = struct.unpack_from(order + "I", tiff, 4)[0]
    if start + 2 > len(tiff):
        return 1
    for i in range(struct.unpack_from(order + "H", tiff, start)[0]):
        entry = start + 2 + 12 * i
        if entry + 12 > len(tiff):
            return 1
        if struct.unpack_from(order + "H", tiff, entry)[0] == _ORIENTATION:
            value = int(struct.unpack_from(order + "H", tiff, entry + 8)[0])
            return value if 1 <= value <= 8 else 1
    return 1


def jpeg_ends(data: bytes) -> bool:
    """Whether the end marker follows the compressed data; inside that data it cannot occur (bytes 0xFF are stuffed)."""
    return data.rfind(_END) > read_jpeg_header(data)[3]


def probe(path: Path) -> tuple[int, int]:
    """Width and height as displayed, in pixels, and a check that the file is whole; nothing is decompressed.

    Raises:
        DataError: the file is missing, truncated or no picture; it is named.

    """
    try:
        data = path.read_bytes()
        if not data:
            raise ValueError("empty file")
        return _probe(data)
    except (ValueError, OSError, SyntaxError, struct.error, IndexError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        if "cannot identify image file" in reason:
            reason = "not a picture"
        raise DataError(f"{path}: {reason}") from error


def _probe(data: bytes) -> tuple[int, int]:
    if data[:2] == JPEG:
        width, height, orientation, start = read_jpeg_header(data)
        if data.rfind(_END) <= start:
            raise ValueError("truncated JPEG (no end marker)")
        return (height, width) if orientation >= 5 else (width, height)
    if data[:8] == PNG:
        if data.rfind(b"IEND") < 0:
            raise ValueError("truncated PNG (no end chunk)")
        if b"eXIf" not in data:
            width, height = struct.unpack_from(">II", data, 16)
            return width, height
    from PIL import Image  # not at the top: plans are printed without image libraries

    with Image.open(io.BytesIO(data)) as file:
        turned = file.getexif().get(_ORIENTATION, 1) >= 5
        width, height = file.size
        if file.format == "TIFF":  # newer Pillow gives the size as displayed, older the size as stored
            width, height = (int(file.tag_v2[tag]) for tag in (256, 257))  # type: ignore[attr-defined]
        return (height, width) if turned else (width, height)
