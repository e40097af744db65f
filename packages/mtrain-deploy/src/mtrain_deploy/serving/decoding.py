"""Decodes images that strangers have sent."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mtrain.core.interfaces import Array
from mtrain.data.images.decode import decode_bytes
from mtrain.data.images.header import JPEG, PNG, reason_of, stored_size
from mtrain.errors import DataError
from mtrain_deploy.serving.metrics import Metrics
from mtrain_deploy.serving.refusal import Refusal
from mtrain_deploy.serving.uploads import Upload

# Each further decoder is one more that strangers can feed.
FORMS = "JPEG, PNG, WebP or BMP"
"""The forms that are decoded."""


SHARE_PIXELS = 2_000_000
"""Pixels of an image that count for nothing in ``PixelBudget``."""
_BUDGET_IN_REQUESTS = 4
"""Largest requests whose pixels may be in work at the same time."""


class PixelBudget:
    """The pixels of all images in work, apart from a share that each image has.

    The number of images in work is bounded too (``batching.Places``). So small images are taken even while large ones
    have used up the budget, and the time until all that is in work is decoded has a bound.
    """

    def __init__(self, request_pixels: int, metrics: Metrics) -> None:
        self._limit = _BUDGET_IN_REQUESTS * request_pixels
        self._held = 0
        self._metrics = metrics

    @contextmanager
    def hold(self, pixels: Sequence[int]) -> Iterator[None]:
        """Count the pixels of some images while they are in work.

        Raises:
            Refusal: Too many are in work already.
        """
        beyond = sum(max(each - SHARE_PIXELS, 0) for each in pixels)
        if beyond and self._held + beyond > self._limit:
            raise Refusal(503, "too many large images are in work; try again later", retry_after_s=1)
        self._count(beyond)
        try:
            yield
        finally:
            self._count(-beyond)

    def _count(self, pixels: int) -> None:
        self._held += pixels
        self._metrics.pixels.set(self._held)


def check_request(pixels: Sequence[int], *, request_pixels: int) -> None:
    """Check how many pixels the images of a request have together.

    Raises:
        Refusal: More than ``request_pixels``.
    """
    if sum(pixels) > request_pixels:
        raise Refusal(
            413,
            f"the {len(pixels)} images of the request have {sum(pixels) / 1e6:.4g} million pixels, more than the "
            f"{request_pixels / 1e6:g} million that are decoded for one request; send fewer or smaller images",
        )


def pixels_of(upload: Upload, *, max_pixels: int) -> int:
    """Return the number of pixels of an image, read from its header. Nothing is decoded.

    Raises:
        Refusal: It is of another form, its header is damaged, or it has more than ``max_pixels``.
    """
    content, name = upload.content, upload.name
    # By content and not by name or type, which clients choose.
    is_webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    if not (content[:2] in (JPEG, b"BM") or content[:8] == PNG or is_webp):
        raise Refusal(415, f"{name}: is no image in the form of {FORMS}; convert it to one of these")
    try:
        width, height = stored_size(content)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can raise any exception inside the decoding library
        raise _refuse_damaged(name, error) from None
    if width * height > max_pixels:
        raise Refusal(
            413,
            f"{name}: {width} x {height} pixels, more than the {max_pixels / 1e6:g} million that are decoded; make "
            "the image smaller",
        )
    return width * height


def decode(upload: Upload, *, max_pixels: int) -> Array:
    """Decode an image as it is displayed: uint8 (H, W, 3) RGB; see ``data.images.decode``.

    Raises:
        Refusal: It is of another form, damaged, or has more than ``max_pixels``.
    """
    pixels_of(upload, max_pixels=max_pixels)
    content, name = upload.content, upload.name
    try:
        return decode_bytes(content, name, max_pixels=max_pixels)
    except DataError as error:
        if isinstance(error.__cause__, MemoryError):
            # Memory is short on the server: that is no fault of the image.
            raise error.__cause__ from None
        raise _refuse_damaged(name, error.__cause__ or error) from None


def _refuse_damaged(name: str, error: BaseException) -> Refusal:
    reason = reason_of(error) if isinstance(error, Exception) else type(error).__name__
    return Refusal(422, f"{name}: cannot be decoded ({reason}); send an image that is whole")
