"""Read a picture file's header cheaply: its size as displayed and whether the file is whole. Nothing is decompressed.

The first bytes of a file decide its format; the suffix is ignored.
"""

import io
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.errors import DataError
from mtrain.files import read_bytes

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".jpe", ".mpo", ".png", ".tif", ".tiff", ".webp"})
"""Lower-case suffixes of the files that count as pictures when a folder is searched."""

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
"""The only Pillow decoders in use. Others start programs (EPS: Ghostscript) or were written for trusted
files."""
MAX_BYTES = 2 << 30
"""Largest picture file that is read, in bytes."""
MAX_PIXELS = 120_000_000
"""Default of `data.max_pixels`, the largest picture that is decoded: 360 MB as RGB."""

JPEG = b"\xff\xd8"
PNG = b"\x89PNG\r\n\x1a\n"
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END = b"\xff\xd9"
_ORIENTATION = 0x0112


def read_jpeg_header(data: bytes) -> tuple[int, int, int, int]:
    """Return stored width and height, EXIF orientation (1 if none), and the offset of the compressed data.

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
    """Return whether the end marker follows the compressed data, where it cannot occur itself (0xFF bytes are
    stuffed)."""
    return data.rfind(_END) > read_jpeg_header(data)[3]


class PictureError(DataError):
    """A picture cannot be used. ``reason`` is the message without the name of the file."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[type[DataError], tuple[str]]:
        """Arrive from a loader's process as the message alone."""
        return DataError, (str(self),)


def probe(path: Path) -> tuple[int, int]:
    """Return width and height as displayed, in pixels, and check that the file is whole; nothing is decompressed.

    Raises:
        DataError: the file is missing, truncated or no picture; it is named.

    """
    try:
        data = read_bytes(path, limit=MAX_BYTES)
    except OSError as error:
        raise PictureError(path, reason_of(error)) from error
    return probe_bytes(data, path)


def probe_bytes(data: bytes, name: Path | str) -> tuple[int, int]:
    """Return what ``probe`` does for the content of a picture file; ``name`` is used in messages only.

    Raises:
        DataError: as ``probe``.

    """
    try:
        if not data:
            raise ValueError("empty file")
        return _probe(data)
    except Exception as error:  # a damaged file can raise any exception inside the decoding library
        raise PictureError(name, reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Return the reason why a picture cannot be read, in one line of bounded length."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    if "cannot identify image file" in reason:
        return "not a picture in JPEG, PNG, BMP, WebP, TIFF or GIF form"
    return reason[:300] or type(error).__name__


def need_bounded(path: Path | str, size: tuple[int, int], *, max_pixels: int) -> None:
    """Refuse a picture of more than ``max_pixels`` by its (width, height), before anything is decoded.

    Raises:
        DataError: it is larger.
    """
    width, height = size
    if width * height > max_pixels:
        raise PictureError(
            path,
            f"{width} x {height} pixels are {width * height / 1e6:.0f} million, more than the "
            f"{max_pixels / 1e6:g} million that are decoded; make the picture smaller, or raise data.max_pixels",
        )


def stored_size(data: bytes) -> tuple[int, int]:
    """Return width and height from the header, before any EXIF orientation; nothing else is read.

    Raises:
        Exception: any kind; the header is damaged.
    """
    if data[:2] == JPEG:
        return read_jpeg_header(data)[:2]
    if data[:8] == PNG:
        width, height = struct.unpack_from(">II", data, 16)
        return width, height
    with open_picture(data) as file:
        return file.size


def open_picture(data: bytes) -> "ImageFile":
    """Open a picture file in one of ``FORMATS`` with Pillow, which reads only its header."""
    from PIL import Image  # imported here so that printing a plan needs no image library

    # Pillow's own limit cannot be raised for one file. ``need_bounded`` is called before every decoding instead.
    Image.MAX_IMAGE_PIXELS = None
    return Image.open(io.BytesIO(data), formats=FORMATS)


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
    with open_picture(data) as file:
        is_rotated = file.getexif().get(_ORIENTATION, 1) >= 5
        width, height = file.size
        if file.format == "TIFF":  # newer Pillow versions report the size as displayed, older ones as stored
            width, height = (int(file.tag_v2[tag]) for tag in (256, 257))  # type: ignore[attr-defined]
        return (height, width) if is_rotated else (width, height)
