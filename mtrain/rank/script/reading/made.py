"""Global batches that a script makes itself in each update, such as those drawn from the memory of an agent."""

import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from mtrain.core.interfaces import HostBatch, RankSession
from mtrain.core.samples.sampler import Shares
from mtrain.data import trees
from mtrain.errors import ScriptError


class MadeBatches:
    """The updates of a job whose script makes the same global batch on every rank, and asks for this rank's share of it."""

    length: int | None = None
    """Number of samples; there is none."""
    updates_per_epoch: int | None = None
    """Updates have no epochs."""

    def __init__(self, global_batch: int) -> None:
        self.global_batch = global_batch
        self._mark = 0

    def updates_of(self, epochs: int) -> int:
        """Refuse a length in epochs.

        Raises:
            ScriptError: always.
        """
        raise ScriptError("session.updates: the length is given in epochs; a script that makes its batches has none")

    def place(self, update: int) -> tuple[int, int]:
        """Return (epoch, position) of an update of the job."""
        return 0, update

    def size(self, epoch: int, position: int) -> int:
        """Return the number of samples of an update over all ranks."""
        return self.global_batch

    def ends_after(self, epoch: int, position: int) -> bool:
        """Return False: there is one epoch only."""
        return False

    def mark(self, epoch: int) -> int:
        """Return a checksum of what was shared in the update in hands, by which ranks see that they share the same."""
        return self._mark

    def state_before(self, epoch: int, position: int) -> Any:
        """Return nothing: the script keeps the state of what it makes batches from."""

    def micro_batches(self, epoch: int, start: int, *, shares: Shares) -> Generator[Any, None, None]:
        """Yield the number of each update from ``start`` on."""
        while True:
            self._mark = 0
            yield np.array([start])
            start += 1

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def share(
        self, batch: Any, shares: Shares, rank: RankSession, *, floats: Any, saw: Callable[[HostBatch], None]
    ) -> Any:
        """Return this rank's share of a global batch, on the device; see ``Session.share``."""
        arrays, structure = trees.flatten(batch, floats=floats)
        lengths = {path: array.shape[0] if array.ndim else 0 for path, array in arrays.items()}
        if not arrays or set(lengths.values()) != {self.global_batch}:
            raise ScriptError(
                f"session.share: a batch of {sorted(set(lengths.values())) or 'no'} rows given; expected arrays or tensors of "
                f"{self.global_batch} rows each, as many as session.updates(global_batch={self.global_batch}) says"
            )
        for path in sorted(arrays):
            self._mark = zlib.crc32(arrays[path].tobytes(), self._mark)
        saw(arrays)
        (own,) = shares.spread(np.arange(self.global_batch))
        tensors = next(iter(rank.batches([{path: array[own] for path, array in arrays.items()}])))
        return trees.rebuilt(structure, tensors)


class Numbered(Iterator[int]):
    """The numbers of the updates of a loop over ``MadeBatches``."""

    def __init__(self, loop: Iterator[Any], number: Callable[[], int]) -> None:
        """``number`` returns that of the update in hands."""
        self._loop = loop
        self._number = number

    def __next__(self) -> int:
        """Finish the update before, and return the number of the next one."""
        next(self._loop)
        return self._number()
