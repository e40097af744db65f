"""Micro batches of one rank, prepared ahead by worker processes in shared memory.

Built in two steps. A :class:`WorkerPool` forks its workers at once, while the process is small, has one thread and no
framework. Later, when rank and batch are known, :meth:`WorkerPool.loader` gives loaders over its sources.

Every sample is a task of its own and the workers share one queue in job order: all of them work on the batch that is
needed next, so the first one comes soonest and no slow picture holds up more than itself. Batches come in job order
whatever the timing, and the same for any number of workers, because a sample depends on (seed, epoch, index) alone, and
what the samples of an update share, such as their size, on (seed, epoch, update).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mtrain.core.interfaces import Array, HostBatch, Source
from mtrain.data.loader.shared_memory import ArraySpec, Ring, shared_bytes
from mtrain.data.loader.workers import Executor, Inline, Task, Workers
from mtrain.errors import DataError, SpecError, TrainingError

LIVES = 2
"""A batch's arrays stay as they are through this many further ``next()`` calls."""
CANCELLABLE = 4096
"""Loaders that may be open at the same time."""
RING_BYTES = 8 << 30
"""Address space per source, of which only what is written to becomes memory."""

Indices = Callable[[int, int], Sequence[Array]]
"""(epoch, update) -> this rank's micro batches of it, each an int64 array of sample indices."""


class PooledSource(Source, Protocol):
    """A source whose large array per sample goes straight to shared memory."""

    array: ArraySpec

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        """Of the array in the samples of one update: no larger than ``array.shape``."""
        ...

    def fill(self, epoch: int, index: int, out: Array, *, update: int) -> Any:
        """``sample`` with the array written to ``out`` and left out of what is returned, which is small and
        picklable."""
        ...

    def describe(self, index: int) -> str:
        """The sample in words, for errors: its file."""
        ...


@dataclass(slots=True, eq=False)
class _Job:
    """One micro batch under way."""

    key: tuple[int, int, int]
    """Epoch, update, number of the micro batch in it."""
    indices: list[int]
    start: int
    """Its first place in the ring."""
    items: list[Any]
    missing: int
    error: str | None = None
    failed: int = -1
    """The sample that ``error`` is about."""
    serial: int = -1


@dataclass(slots=True)
class _Shelf:
    """One source with its ring and the places that are taken."""

    number: int
    source: PooledSource
    ring: Ring
    taken: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of the loaders' places, in order."""

    def take(self, count: int) -> int | None:
        """The start of ``count`` free neighbouring places; None: there are not as many."""
        start = 0
        for first, end in self.taken:
            if first - start >= count:
                break
            start = end
        if start + count > self.ring.capacity:
            return None
        self.taken.append((start, start + count))
        self.taken.sort()
        return start

    def give_back(self, start: int) -> None:
        """What ``take`` returned."""
        self.taken = [area for area in self.taken if area[0] != start]


class WorkerPool:
    """Loader processes for several sources (``train``, ``val``); ``workers=0`` prepares samples in this process.

    Create it in the main thread and before a framework is imported: it forks, and the workers die with that thread.
    """

    def __init__(self, sources: Mapping[str, PooledSource], *, workers: int, ring_bytes: int = RING_BYTES) -> None:
        """``ring_bytes``: upper limit of shared memory per source; pages are taken when first used."""
        self._shelves = {
            name: _Shelf(i, source, Ring.within(source.array, ring_bytes))
            for i, (name, source) in enumerate(sources.items())
        }
        by_number = list(self._shelves.values())
        # A loader's tasks with a serial below its entry were cancelled.
        self._oldest = oldest = shared_bytes(8 * CANCELLABLE).view("int64")
        self._loaders = 0
        self._jobs: dict[int, _Job] = {}
        self._serial = 0

        def handle(task: Task) -> Any:
            if task.serial < oldest[task.loader % CANCELLABLE]:
                return None
            shelf = by_number[task.source]
            source, epoch, update = shelf.source, task.epoch, task.update
            out = shelf.ring.place(task.start, task.position, source.shape(epoch, update))
            return source.fill(epoch, task.sample, out, update=update)

        self._executor: Executor = Workers(workers, handle, shared_bytes(1)) if workers else Inline(handle)
        self.workers = workers
        self.is_open = True

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._executor.pids if isinstance(self._executor, Workers) else []

    def loader(  # noqa: PLR0913 - each is a property of one rank's order, and known only to the caller
        self,
        name: str,
        indices: Indices,
        *,
        micro_batch: int,
        accumulate: int = 1,
        updates_per_epoch: int,
        prefetch: int = 4,
        epochs: int = 0,
    ) -> "ShardedLoader":
        """A loader over the source ``name``.

        Args:
            name: key of the source.
            indices: (epoch, update) -> this rank's ``accumulate`` index arrays of at most ``micro_batch``.
            micro_batch: largest number of samples in a micro batch.
            accumulate: micro batches per update.
            updates_per_epoch: length of an epoch.
            prefetch: micro batches prepared ahead of the one in use.
            epochs: number of passes in all; at the end of epoch e the first batches of e + 1 are prepared while
                e + 1 < epochs. 0: nothing is prepared beyond the epoch asked for.

        Raises:
            SpecError: the micro batches do not fit into the ring.

        """
        plan = _Plan(micro_batch, accumulate, updates_per_epoch, prefetch if self.workers else 0, epochs)
        self._loaders += 1
        return ShardedLoader(self, self._shelves[name], indices, plan, number=self._loaders)

    def close(self) -> None:
        """End the workers; their memory goes when the last view of a batch does. Can be called twice."""
        self.is_open = False
        self._jobs.clear()
        self._executor.close()

    def submit(self, job: _Job, *, shelf: _Shelf, loader: int) -> None:
        """Queue a job's samples; for loaders."""
        job.serial = self._serial
        self._serial += 1
        self._jobs[job.serial] = job
        self._executor.submit(
            Task(shelf.number, loader, job.serial, *job.key[:2], index, job.start, position)
            for position, index in enumerate(job.indices)
        )

    def cancel(self, loader: int) -> None:
        """Workers skip what is queued for this loader, which still waits for the jobs' places."""
        self._oldest[loader % CANCELLABLE] = self._serial

    def collect(self) -> None:
        """Wait for results and note them in their jobs; for loaders.

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
    """How a loader walks."""

    micro_batch: int
    accumulate: int
    updates_per_epoch: int
    prefetch: int
    epochs: int


class ShardedLoader:
    """This rank's micro batches; made by :meth:`WorkerPool.loader`. Implements ``core.interfaces.Loader``.

    The arrays of a batch are views of shared memory. Those of ``next()`` number k stay as they are during the calls k
    + 1 and k + 2 and until call k + 3 is made, which may begin to overwrite them; this holds across epochs. ``close``
    ends them. So a device may still be copying two batches while the third is asked for. Copy what is kept longer.
    """

    def __init__(self, pool: WorkerPool, shelf: _Shelf, indices: Indices, plan: _Plan, *, number: int) -> None:
        self.updates_per_epoch = plan.updates_per_epoch
        self._pool, self._shelf, self._indices, self._plan = pool, shelf, indices, plan
        self._number = number
        slots = LIVES + 1 + plan.prefetch
        capacity = shelf.ring.capacity
        first = shelf.take(slots * plan.micro_batch)
        if first is None:
            raise SpecError(
                f"data.prefetch: {slots} micro batches of {plan.micro_batch} samples of {shelf.ring.spec.nbytes} bytes "
                f"do not fit into the loader's {capacity} places; use fewer data.prefetch or a smaller train.max_micro_batch"
            )
        self._first = first
        self._free = deque(range(first, first + slots * plan.micro_batch, plan.micro_batch))
        self._ahead: deque[_Job] = deque()
        self._draining: list[_Job] = []
        self._held: deque[int] = deque()
        self._keys: Iterator[tuple[tuple[int, int, int], list[int]]] = iter(())
        self._closed = False

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """``accumulate`` micro batches for each update from ``start`` to the end of the epoch.

        What was prepared ahead is used if this is where the loader stands, else dropped. Only the newest iterator may
        be used.

        Raises:
            DataError: a sample cannot be made; it is named, with the worker's traceback.
            TrainingError: a worker has died.

        """
        assert not self._closed, "a closed loader gives no batches: ask the pool for another one"
        if not self._ahead or self._ahead[0].key != (epoch, start, 0):
            self._drop()
            self._keys = self._walk(epoch, start)
        for _ in range((self._plan.updates_per_epoch - start) * self._plan.accumulate):
            yield self._next()

    def close(self) -> None:
        """Give the ring's places back; workers end with the pool. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._drop()
        while self._pool.is_open and any(job.missing for job in self._draining):
            self._pool.collect()
        self._shelf.give_back(self._first)

    def _next(self) -> dict[str, Array]:
        while len(self._held) > LIVES:
            self._free.append(self._held.popleft())
        self._dispatch()
        while not self._ahead:
            self._pool.collect()
            self._dispatch()
        job = self._ahead.popleft()
        self._held.append(job.start)
        while job.missing:
            self._pool.collect()
        source = self._shelf.source
        if job.error is not None:
            raise DataError(f"sample {job.failed} ({source.describe(job.failed)}): {job.error}")
        images = self._shelf.ring.places(job.start, len(job.indices), source.shape(*job.key[:2]))
        epoch = np.array([job.key[0]], dtype=np.int64)
        return {self._shelf.ring.spec.name: images, **source.collate(job.items), "epoch": epoch}

    def _dispatch(self) -> None:
        """Start jobs while there are places for them."""
        done = [job for job in self._draining if not job.missing]
        self._free.extend(job.start for job in done)
        self._draining = [job for job in self._draining if job.missing]
        while self._free and len(self._ahead) <= self._plan.prefetch and (following := next(self._keys, None)):
            key, indices = following
            job = _Job(key, indices, self._free.popleft(), [None] * len(indices), len(indices))
            self._ahead.append(job)
            self._pool.submit(job, shelf=self._shelf, loader=self._number)

    def _drop(self) -> None:
        """Forget what was prepared ahead; its places come back when the workers have left them."""
        if self._ahead:
            self._pool.cancel(self._number)
            self._draining.extend(self._ahead)
            self._ahead.clear()
        self._keys = iter(())

    def _walk(self, epoch: int, start: int) -> Iterator[tuple[tuple[int, int, int], list[int]]]:
        """Keys and indices of all micro batches to come."""
        plan = self._plan
        while True:
            for update in range(start, plan.updates_per_epoch):
                shares = self._indices(epoch, update)
                for number in range(plan.accumulate):
                    yield (epoch, update, number), [int(i) for i in shares[number]]
            epoch, start = epoch + 1, 0
            if epoch >= plan.epochs:
                return
