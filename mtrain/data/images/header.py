"""Read an image file's header cheaply: its size as displayed and whether the file is whole. Nothing is decompressed.

The first bytes of a file decide its format; the suffix is ignored.
"""

import errno
import io
import struct
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mtrain.errors import DataError
from mtrain.spec.files import open_file, read_bytes

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".jpe", ".mpo", ".png", ".tif", ".tiff", ".webp"})
"""Lower-case suffixes of the files that count as images when a folder is searched."""

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
"""The only Pillow decoders in use. Others start programs (EPS: Ghostscript) or were written for trusted
files."""
MAX_BYTES = 2 << 30
"""Largest image file that is read, in bytes."""
SMALL_BYTES = 64 << 20
"""Size up to which an image file is read whatever its header says, in bytes."""
MAX_PIXEL_BYTES = 16
"""Most bytes of a pixel in a file: four numbers of 32 bits."""
MAX_PIXELS = 120_000_000
"""Default of `data.max_pixels`, the largest image that is decoded: 360 MB as RGB."""

JPEG = b"\xff\xd8"
PNG = b"\x89PNG\r\n\x1a\n"
MAX_SEGMENTS = 10_000
"""Parts of a JPEG header that are read. A segment has up to 65,535 bytes, so that files of cameras and programs have
hundreds at most; megabytes of empty ones would take seconds."""
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END = b"\xff\xd9"
_ORIENTATION = 0x0112


def read_jpeg_header(data: bytes) -> tuple[int, int, int, int]:
    """Return stored width and height, EXIF orientation (1 if none), and the offset of the compressed data.

    Raises:
        ValueError: the header is damaged.

    """
    position, orientation, size = 2, 1, (0, 0)
    for _ in range(MAX_SEGMENTS):
        if position + 4 > len(data):
            raise ValueError("JPEG ends within its header")
        if data[position] != 0xFF:
            raise ValueError("damaged JPEG header")
        marker = data[position + 1]
        # Fill bytes, and markers that have no length (ISO/IEC 10918-1, table B.1).
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
    raise ValueError(f"JPEG with more than {MAX_SEGMENTS} parts before the image")


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


class ImageError(DataError):
    """An image cannot be used. ``reason`` is the message without the name of the file."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[type[DataError], tuple[str]]:
        """Arrive from a loader's process as the message alone."""
        return DataError, (str(self),)


def read_image(path: Path | str) -> bytes:
    """Return the content of an image file.

    Raises:
        OSError: It is missing, unreadable, not a regular file, or too long; ``strerror`` says which.
    """
    path = Path(path)
    try:
        return read_bytes(path, limit=SMALL_BYTES)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        # A sparse file takes no place on the disk and any amount of memory, so
        # a large file must have the header of an image that may be as large.
        with open_file(path) as file:
            limit = expected_bytes(file)
        if limit is None:
            raise OSError(
                errno.EFBIG, f"{error.strerror}; its header is not that of a larger image", str(path)
            ) from None
    return read_bytes(path, limit=limit)


def expected_bytes(file: IO[bytes]) -> int | None:
    """Return the most bytes that an image with the header of an open file has; None if it has no such header."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
    except Exception:  # a damaged file can raise any exception inside the decoding library
        return None
    return min(MAX_BYTES, SMALL_BYTES + width * height * MAX_PIXEL_BYTES)


def probe(path: Path) -> tuple[int, int]:
    """Return width and height as displayed, in pixels, and check that the file is whole; nothing is decompressed.

    Raises:
        DataError: the file is missing, truncated or no image; it is named.

    """
    try:
        data = read_image(path)
    except OSError as error:
        raise ImageError(path, reason_of(error)) from error
    return probe_bytes(data, path)


def probe_bytes(data: bytes, name: Path | str) -> tuple[int, int]:
    """Return what ``probe`` does for the content of an image file; ``name`` is used in messages only.

    Raises:
        DataError: as ``probe``.

    """
    try:
        if not data:
            raise ValueError("empty file")
        return _probe(data)
    except Exception as error:  # a damaged file can raise any exception inside the decoding library
        raise ImageError(name, reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Return the reason why an image cannot be read, in one line of bounded length."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    if "cannot identify image file" in reason:
        return "not an image in JPEG, PNG, BMP, WebP, TIFF or GIF form"
    return reason[:300] or type(error).__name__


def need_bounded(path: Path | str, size: tuple[int, int], *, max_pixels: int) -> None:
    """Refuse an image of more than ``max_pixels`` by its (width, height), before anything is decoded.

    Raises:
        DataError: it is larger.
    """
    width, height = size
    if width * height > max_pixels:
        raise ImageError(
            path,
            f"{width} x {height} pixels are {width * height / 1e6:.0f} million, more than the "
            f"{max_pixels / 1e6:g} million that are decoded; make the image smaller, or raise data.max_pixels",
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
    with open_image(data) as file:
        return file.size


def open_image(data: bytes) -> "ImageFile":
    """Open an image file in one of ``FORMATS`` with Pillow, which reads only its header."""
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
    with open_image(data) as file:
        is_rotated = file.getexif().get(_ORIENTATION, 1) >= 5
        width, height = file.size
        if file.format == "TIFF":  # newer Pillow versions report the size as displayed, older ones as stored
            width, height = (int(file.tag_v2[tag]) for tag in (256, 257))  # type: ignore[attr-defined]
        return (height, width) if is_rotated else (width, height)
