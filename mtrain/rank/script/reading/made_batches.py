"""Global batches that a script makes itself in each update, such as those drawn from the memory of an agent."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mtrain.core.interfaces import HostBatch
from mtrain.core.samples.sampler import Shares
from mtrain.data import trees
from mtrain.errors import ScriptError
from mtrain.rank.script.reading.reading import Reading


class MadeBatches(Reading):
    """The updates of a job whose script makes the same global batch on every rank, and asks for this rank's share of it."""

    updates_per_epoch = None
    draws_alike = True
    no_epochs = "session.updates: the length is given in epochs; a script that makes its batches has none"
    differs = (
        "session.share: the ranks have made different batches; make the same one on every rank, with random numbers of numpy, random "
        "or a generator of your own: mtrain seeds those of torch for each rank"
    )

    def __init__(self, global_batch: int) -> None:
        self.global_batch = global_batch
        self._mark = 0

    def order(self, epoch: int) -> int:
        """Return a checksum of what was shared in the update in hands, by which ranks see that they share the same."""
        return self._mark

    def micro_batches(self, epoch: int, start: int, *, shares: Shares) -> Iterator[Any]:
        """Yield the number of each update from ``start`` on."""
        while True:
            # Anew for each update: the checksum of what is shared in it alone is compared after it.
            self._mark = 0
            yield np.array([start])
            start += 1

    def share(self, batch: Any, *, saw: Callable[[HostBatch], None]) -> Any:
        """Return this rank's share of a global batch, on the device; see ``Session.share``."""
        arrays, structure = trees.flatten(batch, floats=self.delivery.floats)
        lengths = {path: array.shape[0] if array.ndim else 0 for path, array in arrays.items()}
        if not arrays or set(lengths.values()) != {self.global_batch}:
            raise ScriptError(
                f"session.share: a batch of {sorted(set(lengths.values())) or 'no'} rows given; expected arrays or tensors of "
                f"{self.global_batch} rows each, as many as session.updates(global_batch={self.global_batch}) says"
            )
        for path in sorted(arrays):
            self._mark = zlib.crc32(arrays[path].tobytes(), self._mark)
        saw(arrays)
        # One share: `Session.updates` refuses a rank with several passes.
        (own,) = self.delivery.shares.spread(np.arange(self.global_batch))
        tensors = next(iter(self.delivery.rank.batches([{path: array[own] for path, array in arrays.items()}])))
        return trees.rebuilt(structure, tensors)
