"""The micro batches of a script's data set as arrays on the device, put together again as the data set has them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtrain.core.interfaces import HostBatch, Progress, RankSession
from mtrain.core.sampler import Shares
from mtrain.data import trees
from mtrain.errors import ScriptError
from mtrain.rank.script.samples import Samples
from mtrain.rank.script.stream import Stream


@dataclass(kw_only=True)
class ScriptFeed:
    """See ``core.feed.Feed``."""

    rank: RankSession
    samples: Samples | Stream
    shares: Shares
    floats: Any
    """Dtype of floating-point arrays in batches; None: as the data set has them."""
    saw: Callable[[HostBatch], None]
    """Takes note of the arrays of the next micro batch."""
    _structures: list[Any] = field(default_factory=list)

    @property
    def updates_per_epoch(self) -> int | None:
        """See ``Feed.updates_per_epoch``."""
        return self.samples.updates_per_epoch

    @property
    def global_batch(self) -> int:
        """See ``Feed.global_batch``."""
        return self.samples.global_batch

    @property
    def spans_epochs(self) -> bool:
        """See ``Feed.spans_epochs``. Ranks whose part of a stream is longer leave the rest of it at the end of an epoch."""
        return not isinstance(self.samples, Stream)

    def open(self, progress: Progress) -> Iterator[Any]:
        """See ``Feed.open``."""
        self._structures = []
        for tensors in self.rank.batches(self._host_batches(progress.epoch, progress.position)):
            yield trees.rebuilt(self._structures.pop(0), tensors)

    def _host_batches(self, epoch: int, position: int) -> Iterator[Mapping[str, Any]]:
        """Yield the arrays of the batches, and remember their structure until the device has them."""
        while True:
            for batch in self.samples.micro_batches(epoch, position, shares=self.shares):
                arrays, structure = trees.flattened(batch, floats=self.floats)
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
        return self.samples.ends_after(progress.epoch, progress.position)

    def order(self, epoch: int) -> int:
        """See ``Feed.order``."""
        return self.samples.mark(epoch)

    def close(self) -> None:
        """See ``Feed.close``."""
        self.samples.close()
