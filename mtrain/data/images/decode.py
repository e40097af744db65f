"""Decode one image file to RGB bytes.

JPEG goes through simplejpeg (libjpeg-turbo, accurate transforms, identical to OpenCV), PNG and BMP through OpenCV,
all other formats through Pillow. The first bytes of a file decide its format; the suffix is ignored.
"""

from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageOps

from mtrain.data.images.header import (
    JPEG,
    MAX_PIXELS,
    PNG,
    ImageError,
    jpeg_ends,
    need_bounded,
    open_image,
    read_image,
    read_jpeg_header,
    reason_of,
    stored_size,
)
from mtrain.errors import DataError


def decode(path: Path, *, reduce: int = 1, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Decode an image as it is displayed: uint8 (H, W, 3) RGB.

    EXIF orientation is applied, grey and palette images become RGB, transparency is laid on white, 16-bit values
    are scaled to 8, CMYK is converted. ``reduce`` 2, 4 or 8 gives ceil(H / reduce) x ceil(W / reduce); JPEGs are then
    decoded at that size, which is faster than decoding and shrinking.

    Raises:
        DataError: the file is missing, unreadable, truncated, no image, or has more than ``max_pixels``; it is named.

    """
    try:
        data = read_image(path)
    except OSError as error:
        raise ImageError(path, f"{error.strerror or error}; expected an image") from error
    return decode_bytes(data, path, reduce=reduce, max_pixels=max_pixels)


def decode_bytes(data: bytes, name: Path | str, *, reduce: int = 1, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Decode the content of an image file like ``decode``; ``name`` is used in messages only.

    Raises:
        DataError: as ``decode``.

    """
    try:
        need_bounded(name, stored_size(data), max_pixels=max_pixels)
        if data[:2] == JPEG:  # two headers in one file may disagree: the decoder's own counts too
            need_bounded(name, simplejpeg.decode_jpeg_header(data)[1::-1], max_pixels=max_pixels)
        return _decode(data, reduce)
    except DataError:
        raise
    except Exception as error:  # a damaged file can raise any exception inside the decoding library
        reason = f"not a readable image ({reason_of(error)}); replace the file or remove it from the data set"
        raise ImageError(name, reason) from error


def _decode(data: bytes, reduce: int) -> NDArray[np.uint8]:
    if data[:2] == JPEG:
        return _decode_jpeg(data, reduce)
    image = _decode_opencv(data) if data[:8] == PNG or data[:2] == b"BM" else _decode_pillow(data)
    return _shrunk(image, reduce)


def _shrunk(image: NDArray[np.uint8], reduce: int) -> NDArray[np.uint8]:
    if reduce == 1:
        return image
    height, width = image.shape[:2]
    size = (-(-width // reduce), -(-height // reduce))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)


def _decode_jpeg(data: bytes, reduce: int) -> NDArray[np.uint8]:
    height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    if colours in ("CMYK", "YCCK"):
        return _shrunk(_decode_pillow(data), reduce)
    min_size = {} if reduce == 1 else {"min_height": -(-height // reduce), "min_width": -(-width // reduce)}
    try:
        image = simplejpeg.decode_jpeg(data, colorspace="RGB", **min_size)
    except ValueError as error:
        # Stray bytes between segments are common and harmless; a file that ends early is neither.
        if "premature" in str(error).lower() or not jpeg_ends(data):
            raise
        image = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=False, **min_size)
    return _orient(image, read_jpeg_header(data)[2])


def _decode_opencv(data: bytes) -> NDArray[np.uint8]:
    if data[:8] == PNG:
        if data.rfind(b"IEND") < 0:
            raise ValueError("PNG ends early")
        # OpenCV, asked for an unchanged image, leaves the orientation out, which Pillow applies.
        if b"eXIf" in data:
            return _decode_pillow(data)
    image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        return _decode_pillow(data)
    if image.dtype == np.uint16:
        # 65535 / 257 is 255: white stays white, and grey levels of 8 bits come back as they were.
        image = image // 257
    image = image.astype(np.uint8, copy=False)
    if image.ndim == 2:
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB), dtype=np.uint8)
    if image.shape[2] == 4:
        return _on_white(np.asarray(cv2.cvtColor(image, cv2.COLOR_BGRA2RGBA), dtype=np.uint8))
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), dtype=np.uint8)


def _decode_pillow(data: bytes) -> NDArray[np.uint8]:
    with open_image(data) as file:
        image: Image.Image = file
        image.load()
        image = ImageOps.exif_transpose(image)
        # ``convert("RGB")`` would cut values of 16 bits off at 255.
        if image.mode.startswith("I;16"):
            grey = (np.asarray(image).astype(np.uint16) // 257).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        if image.mode in ("I", "F"):
            raise ValueError(f"32-bit pixels (mode {image.mode}), expected 8 or 16 bits")
        if image.has_transparency_data:
            return _on_white(np.asarray(image.convert("RGBA")))
        return np.array(image.convert("RGB"))


def _on_white(rgba: NDArray[np.uint8]) -> NDArray[np.uint8]:
    alpha = rgba[:, :, 3:].astype(np.uint16)
    blended = (rgba[:, :, :3].astype(np.uint16) * alpha + 255 * (255 - alpha) + 127) // 255
    return blended.astype(np.uint8)


def _orient(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo EXIF orientation 1 to 8 (EXIF 2.32, tag 0x0112)."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return np.ascontiguousarray(image)
