"""Forms batches from images of several requests, and computes one batch at a time."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from mtrain_deploy.serving.metrics import Metrics
from mtrain_deploy.serving.predictor import Sample
from mtrain_deploy.serving.refusal import Refusal

_SMOOTHING = 0.2
"""Weight of the newest batch in the mean time per image."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    sample: Sample
    output: asyncio.Future[Any]


class Batcher:
    """Collects samples while the former batch is computed, and computes them together."""

    def __init__(
        self,
        compute: Callable[[Sequence[Sample]], list[Any]],
        *,
        max_batch: int,
        max_wait_s: float,
        metrics: Metrics,
    ) -> None:
        self._compute = compute
        self._max_batch, self._max_wait_s = max_batch, max_wait_s
        self._metrics = metrics
        self._waiting: asyncio.Queue[_Item] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.seconds_per_image = 0.0
        """Mean of the last batches; 0.0 before the first."""

    def submit(self, sample: Sample) -> asyncio.Future[Any]:
        """Hand over a sample; return its output as a future. A future that was cancelled in time costs nothing."""
        item = _Item(sample, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(item)
        return item.output

    async def run(self) -> None:
        """Compute batches until this coroutine is cancelled."""
        while True:
            if batch := await self._next_batch():
                await self._compute_batch(batch)

    async def warm(self, sample: Sample) -> None:
        """Compute one sample alone, so that the first request need not wait for allocations.

        Raises:
            Exception: The model cannot be computed.
        """
        await self.alone(lambda: self._compute([sample]))

    async def alone(self, work: Callable[[], T]) -> T:
        """Compute something between two batches, in their thread; it is left out if this is cancelled in time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """End the thread that computes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _next_batch(self) -> list[_Item]:
        items = [await self._waiting.get()]
        try:
            async with asyncio.timeout(self._max_wait_s if self._max_wait_s else None):
                while len(items) < self._max_batch:
                    if self._waiting.empty() and not self._max_wait_s:
                        break
                    items.append(await self._waiting.get())
        except TimeoutError:
            pass
        # Nobody waits any more for outputs that are done: their requests were cancelled or too late.
        wanted = [item for item in items if not item.output.done()]
        self._metrics.abandoned.inc(len(items) - len(wanted))
        return wanted

    async def _compute_batch(self, batch: Sequence[_Item]) -> None:
        started = time.perf_counter()
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._compute, [item.sample for item in batch])
        try:
            outputs = await work
        except Exception as error:
            logger.exception("a batch of %d images could not be computed", len(batch))
            reason = "not enough memory" if isinstance(error, MemoryError) else "the model could not be computed"
            self._metrics.failed.inc(len(batch))
            for item in batch:
                if not item.output.done():
                    item.output.set_exception(Refusal(503, f"{reason}; try again later", retry_after_s=5))
            return
        seconds = time.perf_counter() - started
        self._metrics.count_batch(len(batch), seconds)
        latest = seconds / len(batch)
        known = self.seconds_per_image
        # A mean over several batches, because the first ones after a pause are slower than all others.
        self.seconds_per_image = latest if not known else known + _SMOOTHING * (latest - known)
        for item, output in zip(batch, outputs, strict=True):
            if not item.output.done():
                item.output.set_result(output)


class Places:
    """The number of images that may be in work at once."""

    def __init__(self, capacity: int, metrics: Metrics) -> None:
        self.capacity = capacity
        self.taken = 0
        self._metrics = metrics

    def take(self, count: int, *, seconds_per_image: float) -> None:
        """Take places.

        Raises:
            Refusal: There are not enough; the answer says when some may be free.
        """
        if self.taken + count > self.capacity:
            wait_s = min(max(math.ceil(self.taken * seconds_per_image), 1), 60)
            raise Refusal(
                503,
                f"{self.taken} images are in work and the queue holds {self.capacity}; try again in {wait_s} s",
                retry_after_s=wait_s,
            )
        self.taken += count
        self._metrics.in_work.set(self.taken)

    def give_back(self, count: int) -> None:
        """Give places back."""
        self.taken -= count
        self._metrics.in_work.set(self.taken)
