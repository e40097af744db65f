"""Processes that read the samples of a script's data set ahead of the training loop."""

import multiprocessing
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from typing import Any

from mtrain.data import trees
from mtrain.data.seeded_reading import SeededReader
from mtrain.errors import ScriptError
from mtrain.rank.process import end_with_parent
from mtrain.system.processes import sparing_children

Collate = Callable[[Sequence[Any]], Any]
Request = tuple[int, list[int]]
"""(epoch, sample numbers) of a micro batch."""
AHEAD = 2
"""Micro batches per worker that are read ahead."""


class Workers:
    """A pool of processes that return micro batches in the order in which they are requested."""

    def __init__(self, count: int, dataset: Any, collate: Collate, *, seed: int) -> None:
        """Start ``count`` processes.

        Raises:
            ScriptError: the data set or ``collate`` cannot be pickled.
        """
        # Tried here, for an error that says what to do; the pool would raise Python's own at the first batch.
        try:
            pickle.dumps((dataset, collate))
        except Exception as error:
            raise ScriptError(
                f"session.batches: workers={count} given, but the data set or collate cannot be pickled: {error}; define its "
                "class and functions at the top level of a file, open files in __getitem__, or leave workers out"
            ) from error
        self._count = count
        if threading.current_thread() is threading.main_thread():
            with sparing_children():  # a rank of plain Python has a handler, which programs that it starts lose
                forkserver.ensure_running()
        # By forkserver and not by fork, because a script has imported its framework, whose threads do not survive a fork. Each
        # worker therefore imports the script's file once, and receives the data set pickled.
        self._pool = ProcessPoolExecutor(
            count,
            mp_context=multiprocessing.get_context("forkserver"),
            initializer=_begin,
            initargs=(dataset, collate, seed),
        )

    def read(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield the batch of each request, with arrays in the place of tensors.

        Raises:
            ScriptError: a worker has ended.
        """
        pending: deque[Future[Any]] = deque()
        try:
            for epoch, indices in requests:
                pending.append(self._pool.submit(_read, epoch, indices))
                if len(pending) > AHEAD * self._count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise ScriptError(
                "session.batches: a worker that reads samples has ended; it ran out of memory or was killed, or the script "
                'starts to train when it is imported: put that under if __name__ == "__main__". The log of the rank may say more'
            ) from None
        finally:
            # The loop was left, or the epoch of a rank's part has ended: what was read ahead is of no use.
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def is_imported_by_worker() -> bool:
    """Return whether this process is a worker that is importing the script."""
    # Python imports a worker's script under the name __mp_main__, and makes it __main__ when that has ended.
    imported = sys.modules.get("__mp_main__")
    return (
        multiprocessing.parent_process() is not None
        and imported is not None
        and imported is not sys.modules.get("__main__")
    )


_dataset: Any = None
_collate: Collate = trees.collate
_seed = 0
_epoch: int | None = None


def _begin(dataset: Any, collate: Collate, seed: int) -> None:
    """Prepare this worker."""
    global _dataset, _collate, _seed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides when its workers end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()  # the server that has forked this process ends with the rank
    _dataset, _collate, _seed = dataset, collate, seed


def _read(epoch: int, numbers: Sequence[int]) -> Any:
    """Return the batch of some samples as arrays."""
    global _epoch
    if epoch != _epoch and hasattr(_dataset, "set_epoch"):
        _dataset.set_epoch(epoch)
    _epoch = epoch
    (samples,) = SeededReader(_dataset, seed=_seed, seed_framework=_seed_framework).batches(epoch, [numbers])
    batch = _collate(samples)
    # Arrays, because a tensor is sent through a file descriptor of its own, of which a process may run out.
    return trees.map_leaves(batch, _as_array)


def _as_array(path: str, value: Any) -> Any:
    array = trees.as_array(value)
    return value if array is None else array


def _seed_framework(value: int) -> None:
    """Seed the framework that the script has imported, as the rank does."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(value)
    if paddle := sys.modules.get("paddle"):
        paddle.seed(value)
