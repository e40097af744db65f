"""The source of a training loop's micro batches, epoch after epoch."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mtrain.core.interfaces import Batch, HostBatch, Loader, Progress, RankSession

Item = TypeVar("Item")


class Feed(Protocol):
    """The micro batches of this rank for one training loop."""

    @property
    def updates_per_epoch(self) -> int | None:
        """Number of updates in one epoch; None: that shows at its end."""
        ...

    def samples(self, progress: Progress) -> int:
        """Return the samples of the update at ``progress`` over all ranks."""
        ...

    def fill(self, progress: Progress, number: int) -> float:
        """Return a further factor of the loss of micro batch ``number``: its samples as a multiple of those of a mean shard."""
        ...

    @property
    def spans_epochs(self) -> bool:
        """Tell whether micro batches of the next epoch follow those of an epoch. Else ``open`` is called for each epoch."""
        ...

    def open(self, progress: Progress) -> Iterator[Batch]:
        """Return the micro batches from ``progress`` on, on the device; a generator is closed when it is left."""
        ...

    def ends_after(self, progress: Progress) -> bool:
        """Return whether this rank has no further update in its epoch after the one at ``progress``."""
        ...

    def order(self, epoch: int) -> int:
        """Return a checksum of the order of an epoch's samples, which must be equal on all ranks."""
        ...

    def close(self) -> None:
        """End processes that read micro batches for this loop alone."""
        ...


def _leave(batch: HostBatch) -> HostBatch:
    return batch


@dataclass(frozen=True, kw_only=True)
class LoaderFeed:
    """The micro batches of a ``Loader``, in an order that is the same on every rank."""

    session: RankSession
    loader: Loader
    global_batch: int
    arranged: Callable[[HostBatch], HostBatch] = _leave
    """Arranges a micro batch for the network before it is sent to the device, see ``Model.arranged``."""
    spans_epochs: bool = False

    @property
    def updates_per_epoch(self) -> int | None:
        """See ``Feed.updates_per_epoch``."""
        return self.loader.updates_per_epoch

    def samples(self, progress: Progress) -> int:
        """See ``Feed.samples``."""
        return self.global_batch

    def fill(self, progress: Progress, number: int) -> float:
        """Return 1: all shards are of one length."""
        return 1.0

    def open(self, progress: Progress) -> Iterator[Batch]:
        """See ``Feed.open``."""
        micro_batches = self.loader.micro_batches(progress.epoch, progress.position)
        return self.session.batches(map(self.arranged, micro_batches))

    def ends_after(self, progress: Progress) -> bool:
        """See ``Feed.ends_after``."""
        return progress.position + 1 == self.updates_per_epoch

    def order(self, epoch: int) -> int:
        """Return 0: the order is computed from the spec, which is the same on every rank."""
        return 0

    def close(self) -> None:
        """Do nothing: whoever has made the loader closes it."""


def closable(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Yield the items, and close their iterator when this one is closed, if it can be closed.

    Sessions of other projects may return iterators without ``close``, which ``contextlib.closing`` requires.
    """
    yield from items
