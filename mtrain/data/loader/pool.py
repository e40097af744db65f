"""Prepare micro batches of one rank ahead of time, with worker processes and shared memory.

The loader is built in two steps. A :class:`WorkerPool` forks its workers at once, while the process is small, has one
thread and no framework. Later, when rank and batch are known, :meth:`WorkerPool.loader` gives loaders over its sources.

Batches come in job order whatever the timing, and the same for any number of workers, because a sample depends on
(seed, epoch, index) alone, and what the samples of an update share, such as their size, on (seed, epoch, update).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array, HostBatch
from mtrain.data.loader.ahead import LEAST, MOST, Ahead, Prefetch
from mtrain.data.loader.shared_memory import Ring, shared_bytes
from mtrain.data.loader.source_ring import PooledSource, SourceRing
from mtrain.data.loader.workers import Inline, Task, Workers
from mtrain.errors import DataError, SpecError, TrainingError

LIVES = 2
"""Number of further ``next()`` calls during which a batch's arrays stay unchanged."""
CANCELLABLE = 4096
"""Largest number of loaders that may be open at the same time."""
AHEAD_BYTES = 1 << 30
"""Largest size of the batches of a loader that are prepared ahead, where their number is ``auto`` and nobody says more."""
RING_BYTES = 8 << 30
"""Address space reserved per source; only the pages that are written to take memory."""

Indices = Callable[[int, int], Sequence[Array]]
"""Function (epoch, update) -> this rank's micro batches, each an int64 array of sample indices."""


@dataclass(slots=True, eq=False)
class _Job:
    """One micro batch in preparation."""

    key: tuple[int, int, int]
    """Epoch, update, number of the micro batch in the update."""
    indices: list[int]
    start: int
    """The micro batch's first place in the ring."""
    items: list[Any]
    missing: int
    error: str | None = None
    failed: int = -1
    """Index of the sample that ``error`` is about; -1 without an error."""
    serial: int = -1


class WorkerPool:
    """Loader processes for several sources (``train``, ``val``); with ``workers=0`` this process prepares the samples.

    Create it in the main thread and before a framework is imported: it forks, and the workers end with that thread.
    """

    def __init__(
        self,
        sources: Mapping[str, PooledSource],
        *,
        workers: int,
        ring_bytes: int = RING_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """``ring_bytes``: upper limit of shared memory per source; pages take memory when first used. ``ahead_bytes``: of the
        batches that a loader prepares ahead if their number is ``auto``."""
        self._ahead_bytes = ahead_bytes
        self._source_rings = {
            name: SourceRing(i, source, Ring.within(source.array, ring_bytes))
            for i, (name, source) in enumerate(sources.items())
        }
        by_number = list(self._source_rings.values())
        # Entry i: tasks of loader i with a serial below this number were cancelled.
        self._oldest = oldest = shared_bytes(8 * CANCELLABLE).view("int64")
        self._loaders = 0
        self._jobs: dict[int, _Job] = {}
        self._serial = 0

        def handle(task: Task) -> Any:
            if task.serial < oldest[task.loader % CANCELLABLE]:
                return None
            source_ring = by_number[task.source]
            source, epoch, update = source_ring.source, task.epoch, task.update
            out = source_ring.ring.place(task.start, task.position, source.shape(epoch, update))
            return source.fill(epoch, task.sample, out, update=update)

        self._executor = Workers(workers, handle, shared_bytes(1)) if workers else Inline(handle)
        self.workers = workers
        self.is_open = True

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return self._executor.pids if isinstance(self._executor, Workers) else []

    def loader(  # noqa: PLR0913 - each parameter describes one rank's order, which only the caller knows
        self,
        name: str,
        indices: Indices,
        *,
        micro_batch: int,
        accumulate: int = 1,
        updates_per_epoch: int,
        prefetch: Prefetch = LEAST,
        epochs: int = 0,
    ) -> "ShardedLoader":
        """Return a loader over the source ``name``.

        Args:
            name: key of the source.
            indices: (epoch, update) -> this rank's ``accumulate`` index arrays of at most ``micro_batch``.
            micro_batch: largest number of samples in a micro batch.
            accumulate: micro batches per update.
            updates_per_epoch: length of an epoch.
            prefetch: micro batches prepared ahead of the one in use; auto: see :mod:`mtrain.data.loader.ahead`.
            epochs: number of passes in all; at the end of epoch e the first batches of e + 1 are prepared while
                e + 1 < epochs. 0: nothing is prepared beyond the epoch asked for.

        Raises:
            SpecError: the micro batches do not fit into the ring.

        """
        source_ring = self._source_rings[name]
        most = self._most_ahead(source_ring, micro_batch)
        ahead = Ahead(prefetch if self.workers else 0, most=most, accumulate=accumulate)
        plan = _Plan(micro_batch, accumulate, updates_per_epoch, epochs)
        self._loaders += 1
        return ShardedLoader(self, source_ring, indices, plan, ahead=ahead, number=self._loaders)

    def _most_ahead(self, source_ring: SourceRing, micro_batch: int) -> int:
        """Return how many micro batches ahead memory allows, at least one."""
        by_memory = self._ahead_bytes // (micro_batch * source_ring.ring.spec.nbytes)
        # Half of a ring stays free for another loader of the source.
        by_places = source_ring.ring.capacity // (2 * micro_batch) - LIVES - 1
        return max(min(MOST, by_memory, by_places), 1)

    def close(self) -> None:
        """End the workers. Their memory is freed with the last view of a batch. Can be called twice."""
        self.is_open = False
        self._jobs.clear()
        self._executor.close()

    def submit(self, job: _Job, *, source_ring: SourceRing, loader: int) -> None:
        """Queue the samples of a job. Called by loaders."""
        job.serial = self._serial
        self._serial += 1
        self._jobs[job.serial] = job
        # Every sample is a task of its own in one queue: all workers work on the batch that is
        # needed next, so it is ready as early as possible, and a slow image delays only itself.
        self._executor.submit(
            Task(source_ring.number, loader, job.serial, *job.key[:2], index, job.start, position)
            for position, index in enumerate(job.indices)
        )

    def cancel(self, loader: int) -> None:
        """Let workers skip the queued tasks of this loader, which still waits until the jobs' places are free."""
        self._oldest[loader % CANCELLABLE] = self._serial

    def collect(self) -> None:
        """Wait for results and record them in their jobs. Called by loaders.

        Raises:
            TrainingError: a worker has died.

        """
        try:
            results = self._executor.collect()
        except TrainingError:
            self.close()
            raise
        for serial, position, item, error in results:
            job = self._jobs.get(serial)
            if job is None:
                continue
            job.items[position] = item
            job.missing -= 1
            if error is not None and job.error is None:
                job.error, job.failed = error, job.indices[position]
            if not job.missing:
                del self._jobs[serial]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The order and amount of work of a loader."""

    micro_batch: int
    accumulate: int
    updates_per_epoch: int
    epochs: int


class ShardedLoader:
    """Iterate over this rank's micro batches; created by :meth:`WorkerPool.loader`. Implements
    ``core.interfaces.Loader``.

    The arrays of a batch are views of shared memory. Those of ``next()`` number k stay unchanged during the calls
    k + 1 and k + 2; call k + 3 may begin to overwrite them. This holds across epochs. ``close`` ends them. So a
    device may still be copying two batches while the third is requested. Copy arrays that you keep longer.
    """

    def __init__(
        self, pool: WorkerPool, source_ring: SourceRing, indices: Indices, plan: _Plan, *, ahead: Ahead, number: int
    ) -> None:
        self.updates_per_epoch = plan.updates_per_epoch
        self._pool, self._source_ring, self._indices, self._plan = pool, source_ring, indices, plan
        self._target = ahead
        self._number = number
        slots = LIVES + 1 + ahead.most
        capacity = source_ring.ring.capacity
        first = source_ring.take(slots * plan.micro_batch)
        if first is None:
            raise SpecError(
                f"data.prefetch: {slots} micro batches of {plan.micro_batch} samples of {source_ring.ring.spec.nbytes} "
                "bytes "
                f"do not fit into the loader's {capacity} places; use fewer data.prefetch or a smaller "
                "train.max_micro_batch"
            )
        self._first = first
        self._free = deque(range(first, first + slots * plan.micro_batch, plan.micro_batch))
        self._ahead: deque[_Job] = deque()
        self._draining: list[_Job] = []
        self._in_use: deque[int] = deque()
        self._keys: Iterator[tuple[tuple[int, int, int], list[int]]] = iter(())
        self._closed = False

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """Yield ``accumulate`` micro batches for each update from ``start`` to the end of the epoch.

        Batches prepared ahead are used if they begin at this position, and dropped otherwise. Only the newest
        iterator may be used.

        Raises:
            DataError: a sample cannot be prepared; it is named, with the worker's traceback.
            TrainingError: a worker has died.

        """
        assert not self._closed, "a closed loader gives no batches: ask the pool for another one"
        if not self._ahead or self._ahead[0].key != (epoch, start, 0):
            self._drop()
            self._keys = self._walk(epoch, start)
        self._target.rest()
        for _ in range((self._plan.updates_per_epoch - start) * self._plan.accumulate):
            yield self._next()

    def close(self) -> None:
        """Free the places in the ring; the workers end with the pool. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._drop()
        while self._pool.is_open and any(job.missing for job in self._draining):
            self._pool.collect()
        self._source_ring.give_back(self._first)

    def _next(self) -> dict[str, Array]:
        self._target.ask()
        while len(self._in_use) > LIVES:
            self._free.append(self._in_use.popleft())
        self._dispatch()
        while not self._ahead:
            self._pool.collect()
            self._dispatch()
        job = self._ahead.popleft()
        self._in_use.append(job.start)
        while job.missing:
            self._pool.collect()
        source = self._source_ring.source
        if job.error is not None:
            raise DataError(f"sample {job.failed} ({source.describe(job.failed)}): {job.error}")
        images = self._source_ring.ring.places(job.start, len(job.indices), source.shape(*job.key[:2]))
        epoch = np.array([job.key[0]], dtype=np.int64)
        self._target.receive()
        return {self._source_ring.ring.spec.name: images, **source.collate(job.items), "epoch": epoch}

    def _dispatch(self) -> None:
        """Start jobs while places are free."""
        finished_jobs = [job for job in self._draining if not job.missing]
        self._free.extend(job.start for job in finished_jobs)
        self._draining = [job for job in self._draining if job.missing]
        while self._free and len(self._ahead) <= self._target.count and (following := next(self._keys, None)):
            key, indices = following
            # The place that became free last: those beyond the number in use never take memory.
            job = _Job(key, indices, self._free.pop(), [None] * len(indices), len(indices))
            self._ahead.append(job)
            self._pool.submit(job, source_ring=self._source_ring, loader=self._number)

    def _drop(self) -> None:
        """Discard the batches prepared ahead; their places become free when the workers have finished with them."""
        if self._ahead:
            self._pool.cancel(self._number)
            # Workers may still write into the places of these jobs.
            self._draining.extend(self._ahead)
            self._ahead.clear()
        self._keys = iter(())

    def _walk(self, epoch: int, start: int) -> Iterator[tuple[tuple[int, int, int], list[int]]]:
        """Yield the keys and indices of all micro batches to come."""
        plan = self._plan
        while True:
            for update in range(start, plan.updates_per_epoch):
                shares = self._indices(epoch, update)
                for number in range(plan.accumulate):
                    yield (epoch, update, number), [int(i) for i in shares[number]]
            epoch, start = epoch + 1, 0
            if epoch >= plan.epochs:
                return
