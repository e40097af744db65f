"""Several data sets that are read side by side: an update takes a batch of each."""

import itertools
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

from mtrain.core.samples.sampler import Shares
from mtrain.errors import ScriptError
from mtrain.rank.script.reading.loaders import is_loader
from mtrain.rank.script.reading.samples import Samples

Several: TypeAlias = Mapping[str, Any] | tuple[Any, ...]


def several(dataset: Any) -> Several | None:
    """Return data sets by name, or a tuple of DataLoaders, that a script gives in the place of one data set; None: it is one."""
    if isinstance(dataset, Mapping) and dataset and all(isinstance(name, str) for name in dataset):
        return dataset
    return dataset if isinstance(dataset, tuple) and dataset and all(map(is_loader, dataset)) else None


def batches_of(given: Any, names: Sequence[Any]) -> list[Any]:
    """Return ``global_batch`` for each of several data sets, where it is given by name or place.

    Raises:
        ScriptError: it is given otherwise.
    """
    if given is None:
        return [None] * len(names)
    values = given if isinstance(given, Mapping) else dict(enumerate(given)) if isinstance(given, tuple) else {}
    if set(values) != set(names):
        words = ", ".join(f"{name!r}: 32" for name in names)
        raise ScriptError(
            f"session.batches: global_batch={given!r} given with several data sets; expected a number for each, such as {{{words}}}, or "
            "DataLoaders, which say it"
        )
    return [values[name] for name in names]


def first_batch(given: Any) -> Any:
    """Return the samples per update of the first of several data sets; None: its DataLoader says it."""
    values = list(given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else [given])
    return values[0] if values else None


class Together:
    """The samples of several data sets. The first one counts updates and epochs; the others begin again as often as needed.

    Update ``u`` of the job takes batch ``u`` of each, where the epochs of a data set follow one another.
    """

    def __init__(self, parts: Sequence[Samples], join: Callable[[Sequence[Any]], Any]) -> None:
        """``join`` makes one batch of those of the parts, in their order. All shards of an update have one length."""
        self._first, *self._others = parts
        self._join = join
        self.length = self._first.length

    @property
    def updates_per_epoch(self) -> int | None:
        """Number of updates of each epoch of the first data set."""
        return self._first.updates_per_epoch

    def updates_of(self, epochs: int) -> int:
        """Return the number of updates of the first ``epochs`` epochs."""
        return self._first.updates_of(epochs)

    def place(self, update: int) -> tuple[int, int]:
        """Return (epoch, position) of an update of the job."""
        return self._first.place(update)

    def size(self, epoch: int, position: int) -> int:
        """Return the number of samples of an update that the first data set gives."""
        return self._first.size(epoch, position)

    def ends_after(self, epoch: int, position: int) -> bool:
        """Return whether update ``position`` is the last one of its epoch."""
        return self._first.ends_after(epoch, position)

    def mark(self, epoch: int) -> int:
        """Return a checksum of the orders in which the data sets are read during ``epoch``."""
        update = self._first.updates_of(epoch)
        marks = [self._first.mark(epoch), *(each.mark(each.place(update)[0]) for each in self._others)]
        return zlib.crc32(repr(marks).encode())

    def state_before(self, epoch: int, position: int) -> Any:
        """Return nothing: which samples form an update needs no state."""

    def micro_batches(self, epoch: int, start: int, *, shares: Shares) -> Generator[Any, None, None]:
        """Yield the micro batches of this rank from update ``start`` to the end of the first data set's epoch."""
        update = self._first.updates_of(epoch) + start
        readers: list[Generator[Any, None, None]] = [
            self._first.micro_batches(epoch, start, shares=shares),
            *(_onwards(each, update, shares) for each in self._others),
        ]
        try:
            for micros in zip(*readers, strict=False):  # the first one ends the epoch
                yield self._join(micros)
        finally:
            for reader in readers:
                reader.close()

    def close(self) -> None:
        """End the processes that read samples."""
        for each in (self._first, *self._others):
            each.close()


def _onwards(samples: Samples, update: int, shares: Shares) -> Generator[Any, None, None]:
    """Yield the micro batches of this rank from ``update`` on, without end."""
    first, start = samples.place(update)
    for epoch in itertools.count(first):
        yield from samples.micro_batches(epoch, start if epoch == first else 0, shares=shares)
