"""A model that is served, with the batches that wait for it."""

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np

from mtrain_deploy.serving.batching import Batcher
from mtrain_deploy.serving.metrics import Metrics
from mtrain_deploy.serving.predictor import Predictor
from mtrain_deploy.serving.settings import ServeSettings

DEFAULT_BATCH = 8


class Engine:
    """A model and its batches. A request keeps to one engine, also while another takes its place."""

    def __init__(self, predictor: Predictor, settings: ServeSettings, metrics: Metrics) -> None:
        self.predictor = predictor
        self.max_batch = settings.max_batch or predictor.batch_size or DEFAULT_BATCH
        self.batcher = Batcher(
            predictor.outputs,
            max_batch=self.max_batch,
            max_wait_s=settings.max_wait_ms / 1000,
            metrics=metrics,
        )
        self._users = 0
        self._unused, self._stopped = asyncio.Event(), asyncio.Event()

    async def warm(self) -> None:
        """Compute a first image.

        Raises:
            Exception: The model cannot be computed.
        """
        await self.batcher.warm(self.predictor.sample(np.full((64, 64, 3), 114, np.uint8)))

    @contextlib.contextmanager
    def hold(self) -> Iterator["Engine"]:
        """Keep the engine while a request uses it."""
        self._users += 1
        self._unused.clear()
        try:
            yield self
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def run(self) -> None:
        """Compute batches until ``stop``, or until this coroutine is cancelled."""
        work, stopped = asyncio.ensure_future(self.batcher.run()), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            # A batcher that failed raises its error here; one that was stopped has none.
            if work.done():
                await work
        finally:
            work.cancel()
            stopped.cancel()
            self.batcher.close()

    def stop(self) -> None:
        """Let ``run`` return."""
        self._stopped.set()

    async def wait_until_unused(self) -> None:
        """Wait until no request uses the engine."""
        if self._users:
            await self._unused.wait()
