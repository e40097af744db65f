"""Answers requests for predictions: receives, decodes, computes in batches, and writes the answer."""

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from mtrain.core.interfaces import Array
from mtrain.errors import UsageError
from mtrain.system.placement import usable_cores
from mtrain_deploy.serving import tensors
from mtrain_deploy.serving.batching import Batcher, Places
from mtrain_deploy.serving.decoding import PixelBudget, check_request, decode, pixels_of
from mtrain_deploy.serving.metrics import Metrics
from mtrain_deploy.serving.predictor import Predictor, Sample
from mtrain_deploy.serving.refusal import Refusal
from mtrain_deploy.serving.settings import ServeSettings
from mtrain_deploy.serving.uploads import MAX_FILES, Body, Budget, Upload, images_of

T = TypeVar("T")
DEFAULT_BATCH = 8
CLIENT_GONE = 499
"""Status in the metrics of a request whose client went away before the answer; nobody receives it."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """An image with the output of the model."""

    upload: Upload
    sample: Sample
    output: Any


class Service:
    """A model that answers requests for predictions."""

    def __init__(self, predictor: Predictor, settings: ServeSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.state = "starting"
        """``starting``, ``ready``, ``ending``, or ``broken`` if the model cannot be computed."""
        self.predictor = predictor
        self.max_batch = settings.max_batch or predictor.batch_size or DEFAULT_BATCH
        """Most images that are computed at once."""
        self._batcher = Batcher(
            predictor.outputs,
            max_batch=self.max_batch,
            max_wait_s=settings.max_wait_ms / 1000,
            metrics=self.metrics,
        )
        self.max_files = min(MAX_FILES, settings.queue)
        self._places = Places(settings.queue, self.metrics)
        self._budget = Budget(settings.max_body_bytes, self.metrics)
        self._pixel_budget = PixelBudget(settings.request_pixels, self.metrics)
        threads = settings.threads or usable_cores()
        self._threads_each = max(threads - 1, 1)
        """Threads of the pool that one request may use at once: one stays free for others, where there are several."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    async def run(self) -> None:
        """Compute batches until this coroutine is cancelled."""
        try:
            await self._batcher.warm(self.predictor.sample(np.full((64, 64, 3), 114, np.uint8)))
            self.state = "ready" if self.state == "starting" else self.state
            await self._batcher.run()
        except Exception:
            self.state = "broken"
            logger.exception("the model cannot be computed")
        finally:
            self._batcher.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def in_work(self) -> int:
        """Number of images that are decoded, wait or are computed."""
        return self._places.taken

    async def answer(self, request: Request, *, confidence: float, draw: bool) -> Response:
        """Answer a request for predictions.

        Raises:
            Refusal: The request cannot be answered.
        """

        async def receive(body: Body) -> Any:
            uploads = await images_of(request, body, max_files=self.max_files)
            if draw and len(uploads) > 1:
                raise Refusal(400, f"draw: given {len(uploads)} images; send one in a request that is to be drawn")
            return self._work(uploads, confidence=confidence, drawn_as=_format(request) if draw else None)

        return await self._answer(request, receive)

    async def infer(self, request: Request, *, name: str) -> Response:
        """Answer a request of the open inference protocol for the model ``name``.

        Raises:
            Refusal: The request cannot be answered.
        """

        async def receive(body: Body) -> Any:
            if request.headers.get("content-encoding", "identity") != "identity":
                raise Refusal(415, "the request is compressed; send it as it is", closes=True)
            content = b"".join([chunk async for chunk in body.chunks()])
            return self._infer(content, request.headers.get(tensors.HEADER_LENGTH), name=name)

        return await self._answer(request, receive)

    async def _answer(self, request: Request, receive: Callable[[Body], Any]) -> Response:
        """Receive a request, which gives the work to be done, and do that in time."""
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self.settings.timeout_s
        body = Body(request, limit=self.settings.max_body_bytes, budget=self._budget)
        try:
            work = await self._receive(receive(body), deadline)
            response = await self._in_time(request, work, deadline)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_GONE)
        finally:
            body.close()
        self.metrics.seconds.observe(time.perf_counter() - started)
        return response

    async def _receive(self, arriving: Coroutine[Any, Any, T], deadline: float) -> T:
        if self.state in ("ending", "broken"):
            arriving.close()
            raise Refusal(503, f"the server is {self.state}", retry_after_s=5, closes=True)
        try:
            async with asyncio.timeout_at(deadline):
                return await arriving
        except TimeoutError:
            raise Refusal(
                408, f"the request did not arrive within {self.settings.timeout_s:g} s; send it faster", closes=True
            ) from None

    async def _in_time(self, request: Request, work: Any, deadline: float) -> Response:
        """Return the answer, unless the deadline passes or the client goes away first; then the work is given up."""
        # A client that has gone away must not keep places, pixels and the model busy.
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
        try:
            left_s = deadline - asyncio.get_running_loop().time()
            await asyncio.wait({task, gone}, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                response: Response = task.result()
                return response
            if gone.done():
                raise ClientDisconnect
            raise Refusal(
                504,
                f"the request was not answered within {self.settings.timeout_s:g} s; try again later",
                retry_after_s=1,
            )
        finally:
            task.cancel()
            gone.cancel()

    async def _work(self, uploads: Sequence[Upload], *, confidence: float, drawn_as: str | None) -> Response:
        count = len(uploads)
        with self._at_work(count):
            with self._counted_if_left(count):
                pixels = await self._each(partial(pixels_of, max_pixels=self.settings.max_pixels), uploads)
            check_request(pixels, request_pixels=self.settings.request_pixels)
            with self._pixel_budget.hold(pixels):
                with self._counted_if_left(count):
                    samples = await self._each(lambda upload: self.predictor.sample(self._image(upload)), uploads)
                return await self._predict(uploads, samples, confidence=confidence, drawn_as=drawn_as)

    @contextlib.contextmanager
    def _at_work(self, count: int) -> Iterator[None]:
        """Take the places of some images.

        Raises:
            Refusal: There are not enough places, or memory is short.
        """
        self._places.take(count, seconds_per_image=self._batcher.seconds_per_image)
        try:
            yield
        except MemoryError:
            raise Refusal(503, "not enough memory for this request; send smaller images", retry_after_s=5) from None
        finally:
            self._places.give_back(count)

    async def _infer(self, content: bytes, header_length: str | None, *, name: str) -> Response:
        """Answer a request of the open inference protocol."""
        loop = asyncio.get_running_loop()
        predictor = self.predictor
        asked = await loop.run_in_executor(
            self._pool,
            lambda: tensors.inference(content, header_length, inputs=predictor.inputs(), outputs=predictor.results()),
        )
        count, pixels = tensors.size_of(asked, predictor.inputs())
        if count > self.max_files:
            raise Refusal(413, f"the request has {count} samples, more than {self.max_files}; send several requests")
        if pixels > self.settings.max_pixels:
            raise Refusal(
                413,
                f"the request has images of {pixels} pixels, more than {self.settings.max_pixels}; make them smaller",
            )
        check_request([pixels] * count, request_pixels=self.settings.request_pixels)
        with self._at_work(count), self._pixel_budget.hold([pixels] * count):

            def compute() -> Mapping[str, Array]:
                started = time.perf_counter()
                computed = predictor.compute(asked.arrays)
                self.metrics.count_batch(count, time.perf_counter() - started)
                return computed

            try:
                outputs = await self._batcher.alone(compute)
            except UsageError as error:
                if "memory" in str(error):
                    raise MemoryError from error
                raise Refusal(400, "the model cannot be computed on tensors of these sizes; send others") from None
        self.metrics.images.inc(count)
        body, headers = await loop.run_in_executor(
            self._pool, lambda: tensors.answer(outputs, asked, name=name, version=tensors.VERSION)
        )
        return Response(body, headers=headers)

    @contextlib.contextmanager
    def _counted_if_left(self, count: int) -> Iterator[None]:
        """Count images whose client goes away before they are handed to the batcher, which counts all later ones."""
        try:
            yield
        except asyncio.CancelledError:
            self.metrics.abandoned.inc(count)
            raise

    async def _predict(
        self,
        uploads: Sequence[Upload],
        samples: Sequence[Sample],
        *,
        confidence: float,
        drawn_as: str | None,
    ) -> Response:
        predictor = self.predictor
        outputs = await _all([self._batcher.submit(sample) for sample in samples])
        answers = [_Answer(*parts) for parts in zip(uploads, samples, outputs, strict=True)]
        if drawn_as is not None:
            (content,) = await self._each(
                lambda answer: self._drawing(predictor, answer, confidence, drawn_as), answers
            )
            self.metrics.images.inc()
            return Response(content, media_type=drawn_as)
        rows = await self._each(lambda answer: self._row(predictor, answer, confidence), answers)
        self.metrics.images.inc(len(uploads))
        return JSONResponse({"images": rows})

    async def _each(self, work: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Return ``work(item)`` for each item, computed in the threads of the pool, of which others get a part.

        The pool takes work in the order in which it is handed over. A request hands over a new item when one is done, so
        that the next item of every other request comes before it.
        """
        loop = asyncio.get_running_loop()
        # One request with 32 images would otherwise fill the queue of the pool before all others.
        turns = asyncio.Semaphore(self._threads_each)

        async def work_in_turn(item: Any) -> T:
            async with turns:
                return await loop.run_in_executor(self._pool, work, item)

        return await _all([asyncio.ensure_future(work_in_turn(item)) for item in items])

    def _image(self, upload: Upload) -> Array:
        return decode(upload, max_pixels=self.settings.max_pixels)

    def _row(self, predictor: Predictor, answer: _Answer, confidence: float) -> dict[str, Any]:
        from mtrain.data.images.indexed import png_of_indices

        found = predictor.read(answer.output, answer.sample, confidence=confidence)
        width, height = answer.sample.size_wh
        row = {"name": answer.upload.name, "width": width, "height": height, "predictions": list(found.rows)}
        if found.mask is not None:
            row["mask"] = base64.b64encode(png_of_indices(found.mask)).decode("ascii")
        return row

    def _drawing(self, predictor: Predictor, answer: _Answer, confidence: float, media_type: str) -> bytes:
        from mtrain.data.images.drawing import encode

        found = predictor.read(answer.output, answer.sample, confidence=confidence)
        # Decoded again: a decoded image is large, and while it waits it would take memory.
        drawn = predictor.draw(self._image(answer.upload), found, confidence=confidence)
        return encode(drawn, ".png" if media_type == "image/png" else ".jpg")


def _format(request: Request) -> str:
    """Return the media type of a drawing: PNG where the client prefers it, else JPEG."""
    accepted = request.headers.get("accept", "").lower()
    return "image/png" if "image/png" in accepted and "image/jpeg" not in accepted else "image/jpeg"


async def _all(futures: "Sequence[asyncio.Future[T]]") -> list[T]:
    """Return all results; when one fails or this is cancelled, the others are cancelled too."""
    try:
        return list(await asyncio.gather(*futures))
    finally:
        for future in futures:
            future.cancel()


async def _gone(request: Request) -> None:
    """Return once the client has gone away; the body has been received."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
