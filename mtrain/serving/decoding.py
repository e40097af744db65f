"""Decodes pictures that strangers have sent."""

from mtrain.core.interfaces import Array
from mtrain.data.images.decode import decode_bytes
from mtrain.data.images.header import JPEG, PNG, reason_of, stored_size
from mtrain.errors import DataError
from mtrain.serving.refusal import Refusal
from mtrain.serving.uploads import Upload

FORMS = "JPEG, PNG, WebP or BMP"
"""The forms that are decoded. Each further decoder is one more that strangers can feed."""


def decoded(upload: Upload, *, max_pixels: int) -> Array:
    """Decode a picture as it is displayed: uint8 (H, W, 3) RGB; see ``data.images.decode``.

    Raises:
        Refusal: It is of another form, damaged, or has more than ``max_pixels``.
    """
    content, name = upload.content, upload.name
    is_webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    if not (content[:2] in (JPEG, b"BM") or content[:8] == PNG or is_webp):
        raise Refusal(415, f"{name}: is no picture in the form of {FORMS}; convert it to one of these")
    try:
        width, height = stored_size(content)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can raise any exception inside the decoding library
        raise _damaged(name, error) from None
    if width * height > max_pixels:
        raise Refusal(
            413,
            f"{name}: {width} x {height} pixels, more than the {max_pixels / 1e6:g} million that are decoded; make "
            "the picture smaller",
        )
    try:
        return decode_bytes(content, name, max_pixels=max_pixels)
    except DataError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise _damaged(name, error.__cause__ or error) from None


def _damaged(name: str, error: BaseException) -> Refusal:
    reason = reason_of(error) if isinstance(error, Exception) else type(error).__name__
    return Refusal(422, f"{name}: cannot be decoded ({reason}); send a picture that is whole")
