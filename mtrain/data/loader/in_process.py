"""Micro batches of one rank, prepared in its own process: for data sets of users, which may have imported a framework.

Forking such a process, or sending such an object to another one, is not safe in general.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mtrain.core.interfaces import HostBatch, Source
from mtrain.data.loader.ahead import LEAST, Prefetch
from mtrain.data.loader.pool import Indices


def reads_in_process(sources: Mapping[str, Any]) -> bool:
    """Return whether sources are read in the process of the rank: they have no array for shared memory."""
    return bool(sources) and not any(hasattr(source, "array") for source in sources.values())


class InProcess:
    """Has the methods of ``WorkerPool`` that a job uses, without processes."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def loader(  # noqa: PLR0913 - the parameters are those of ``WorkerPool.loader``
        self,
        name: str,
        indices: Indices,
        *,
        micro_batch: int,
        accumulate: int = 1,
        updates_per_epoch: int,
        prefetch: Prefetch = LEAST,
        epochs: int = 0,
    ) -> "InProcessLoader":
        """Return a loader over the source ``name``; see ``WorkerPool.loader``."""
        return InProcessLoader(self._sources[name], indices, updates_per_epoch=updates_per_epoch)

    def close(self) -> None:
        """Do nothing: there is no process to end."""


class InProcessLoader:
    """Reads each micro batch when it is asked for. Implements ``core.interfaces.Loader``."""

    def __init__(self, source: Source, indices: Indices, *, updates_per_epoch: int) -> None:
        self.updates_per_epoch = updates_per_epoch
        self._source = source
        self._indices = indices

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[HostBatch]:
        """See ``Loader.micro_batches``."""
        for update in range(start, self.updates_per_epoch):
            for share in self._indices(epoch, update):
                samples = [self._source.sample(epoch, int(index), update=update) for index in share]
                yield {**self._source.collate(samples), "epoch": np.array([epoch], dtype=np.int64)}

    def close(self) -> None:
        """Do nothing: there is nothing to end."""
