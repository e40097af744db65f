"""Receives the images of a request, within limits of size, number and time."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from mtrain_deploy.serving.metrics import Metrics
from mtrain_deploy.serving.refusal import Refusal
from mtrain_deploy.serving.settings import MEGABYTE

MAX_FILES = 32
"""Largest number of images in a request."""
_MAX_NAME = 200
# A client that is still sending when the connection ends would see a broken connection instead of the answer.
_DRAIN_S, _DRAIN_BYTES = 2.0, 64 * MEGABYTE
"""How long, and how much of, the rest of a request that is too large is read and thrown away."""
# Smaller requests and slow ones take only what has arrived.
_BUDGET_IN_REQUESTS = 8
"""Largest requests that fit into memory at the same time."""
_RAW = ("", "application/octet-stream", "application/x-www-form-urlencoded")
"""Content types of a body that is taken as one image, besides ``image/*``; the last is what curl sends by default."""
_HOW = "send one image as the body with the content type image/jpeg or image/png, or several as multipart/form-data"


@dataclass(frozen=True, slots=True, eq=False)
class Upload:
    """An image file as it was sent."""

    name: str
    """Name for messages and results, given by the client."""
    content: bytes


class Budget:
    """The bytes of requests that are in memory."""

    def __init__(self, max_body_bytes: int, metrics: Metrics) -> None:
        self._limit = _BUDGET_IN_REQUESTS * max_body_bytes
        self._held = 0
        self._metrics = metrics

    def take(self, size: int) -> None:
        """Count bytes that have arrived.

        Raises:
            Refusal: There are too many.
        """
        if self._held + size > self._limit:
            raise Refusal(503, "too many requests arrive at once; try again later", retry_after_s=1, closes=True)
        self._held += size
        self._metrics.received.set(self._held)

    def give_back(self, size: int) -> None:
        """Count bytes that have left."""
        self._held -= size
        self._metrics.received.set(self._held)


class Body:
    """The body of one request, read as a stream."""

    def __init__(self, request: Request, *, limit: int, budget: Budget) -> None:
        self._request, self._limit, self._budget = request, limit, budget
        self.size = 0
        """Bytes that have arrived."""
        self._stream = request.stream()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives.

        Raises:
            Refusal: It is larger than the limit, whether or not its length was announced.
            ClientDisconnect: The client went away.
        """
        announced = self._request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limit:
            # With "Expect: 100-continue" the client has not begun to send, and waits for the answer.
            await self._refuse(drain="expect" not in self._request.headers)
        async for chunk in self._stream:
            if self.size + len(chunk) > self._limit:
                await self._refuse(drain=True)
            self._budget.take(len(chunk))
            self.size += len(chunk)
            yield chunk

    def close(self) -> None:
        """Give the memory back."""
        self._budget.give_back(self.size)
        self.size = 0

    async def _refuse(self, *, drain: bool) -> None:
        if drain:
            await self._drain()
        raise Refusal(
            413,
            f"the request has more than {self._limit / MEGABYTE:g} MB; send fewer or smaller images",
            closes=True,
        )

    async def _drain(self) -> None:
        left = _DRAIN_BYTES
        try:
            async with asyncio.timeout(_DRAIN_S):
                async for chunk in self._stream:
                    left -= len(chunk)
                    if left < 0:
                        return
        except TimeoutError:
            pass


async def images_of(request: Request, body: Body, *, max_files: int) -> list[Upload]:
    """Receive the images of a request, at least one.

    Raises:
        Refusal: The request is malformed, too large, or holds no or too many images.
        ClientDisconnect: The client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        uploads = await _of_form(request, body, max_files=max_files)
    elif kind in _RAW or kind.startswith("image/"):
        uploads = [Upload("image", b"".join([chunk async for chunk in body.chunks()]))]
    else:
        raise Refusal(415, f"the content type is {kind[:100]}; {_HOW}", closes=True)
    for upload in uploads:
        if not upload.content:
            raise Refusal(400, f"{upload.name}: is empty; {_HOW}")
    return uploads


async def _of_form(request: Request, body: Body, *, max_files: int) -> list[Upload]:
    # One file more than allowed is let through, so that the refusal can be worded here.
    parser = MultiPartParser(request.headers, body.chunks(), max_files=max_files + 1, max_fields=max_files)
    parser.spool_max_size = 0  # never written to a disk: the size of the body is bounded
    try:
        form = await parser.parse()
    except MultiPartException as error:
        # Starlette has one class for all errors of a form.
        if "Too many files" in error.message:
            raise _too_many(max_files) from None
        reason = " ".join(error.message.split()).rstrip(".")
        raise Refusal(400, f"the form cannot be read ({reason}); {_HOW}", closes=True) from None
    except (UnicodeError, ValueError, AssertionError, KeyError) as error:
        raise Refusal(400, f"the form cannot be read ({type(error).__name__}); {_HOW}", closes=True) from None
    try:
        uploads = []
        for key, value in form.multi_items():
            if not isinstance(value, UploadFile):
                raise Refusal(400, f"the part {key[:_MAX_NAME]!r} of the form is no file; {_HOW}")
            name = " ".join((value.filename or "image").split())[:_MAX_NAME]
            uploads.append(Upload(name or "image", await value.read()))
    finally:
        await form.close()
    if not uploads:
        raise Refusal(400, f"the form holds no complete file; {_HOW}")
    if len(uploads) > max_files:
        raise _too_many(max_files)
    return uploads


def _too_many(max_files: int) -> Refusal:
    return Refusal(413, f"the form has more than {max_files} images; send them in several requests", closes=True)
