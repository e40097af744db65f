"""The micro batches of a script's data set as arrays on the device, put together again as the data set has them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtrain.core.interfaces import HostBatch, Progress, RankSession
from mtrain.core.sampler import Shares
from mtrain.data import trees
from mtrain.errors import ScriptError
from mtrain.rank.script.stream import Stream
from mtrain.rank.script.training_data import Source


@dataclass(kw_only=True)
class ScriptFeed:
    """See ``core.feed.Feed``."""

    rank: RankSession
    source: Source
    shares: Shares
    fills_shards: bool
    """Whether no shard of an update may be empty."""
    floats: Any
    """Dtype of floating-point arrays in batches; None: as the data set has them."""
    saw: Callable[[HostBatch], None]
    """Takes note of the arrays of the next micro batch."""
    _structures: list[Any] = field(default_factory=list)

    @property
    def updates_per_epoch(self) -> int | None:
        """See ``Feed.updates_per_epoch``."""
        return self.source.updates_per_epoch

    def samples(self, progress: Progress) -> int:
        """See ``Feed.samples``."""
        return self.source.size(progress.epoch, progress.position)

    def fill(self, progress: Progress, number: int) -> float:
        """See ``Feed.fill``.

        Raises:
            ScriptError: a shard has no sample, and BatchNorm layers take statistics over all shards.
        """
        samples, shards = self.samples(progress), self.shares.shards * self.shares.rounds
        if self.fills_shards and samples < shards:
            raise ScriptError(
                f"session.batches: update {progress.update} has {samples} of the {shards} samples that one in each micro batch of each "
                "rank would need, because sync_batchnorm is on; leave such batches out (drop_last=True), or train without it"
            )
        return self.shares.fill(number, samples)

    @property
    def spans_epochs(self) -> bool:
        """See ``Feed.spans_epochs``. Ranks whose part of a stream is longer leave the rest of it at the end of an epoch."""
        return not isinstance(self.source, Stream)

    def open(self, progress: Progress) -> Iterator[Any]:
        """See ``Feed.open``."""
        self._structures = []
        for tensors in self.rank.batches(self._host_batches(progress.epoch, progress.position)):
            yield trees.rebuilt(self._structures.pop(0), tensors)

    def _host_batches(self, epoch: int, position: int) -> Iterator[Mapping[str, Any]]:
        """Yield the arrays of the batches, and remember their structure until the device has them."""
        while True:
            for batch in self.source.micro_batches(epoch, position, shares=self.shares):
                arrays, structure = trees.flatten(batch, floats=self.floats)
                if not arrays:
                    raise ScriptError(
                        f"session.batches: a batch of type {type(batch).__name__} holds no array and no tensor; return arrays, "
                        "tensors or numbers from the data set, or give a `collate`"
                    )
                self._structures.append(structure)
                self.saw(arrays)
                yield arrays
            epoch, position = epoch + 1, 0

    def ends_after(self, progress: Progress) -> bool:
        """See ``Feed.ends_after``."""
        return self.source.ends_after(progress.epoch, progress.position)

    def order(self, epoch: int) -> int:
        """See ``Feed.order``."""
        return self.source.mark(epoch)

    def close(self) -> None:
        """See ``Feed.close``."""
        self.source.close()
