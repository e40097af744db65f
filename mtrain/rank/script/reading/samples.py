"""Read a script's data set by number: which samples this rank gets, in which order, with which random numbers."""

import itertools
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from mtrain.core.interfaces import Progress
from mtrain.core.samples.sampler import Shares
from mtrain.data import trees
from mtrain.data.objects import Seed, first_unrepeatable, unusable
from mtrain.data.seeded_reading import SeededReader
from mtrain.errors import DataError, ScriptError
from mtrain.rank.script.reading.epochs import Epochs
from mtrain.rank.script.reading.loaders import Selection
from mtrain.rank.script.reading.reading import Reading
from mtrain.rank.script.reading.workers import Request, Workers


class Samples(Reading):
    """The samples of a data set in the order of a job, as a function of (seed, epoch, index) alone.

    Before each sample, the random generators of Python, numpy and the framework are seeded by (seed, epoch, index), so
    that augmentation repeats for every number of ranks and after every resume.

    Other data sets may be read beside it: update ``u`` of the job takes batch ``u`` of each, where the epochs of a data set follow
    one another. This one counts updates and epochs; the others begin again as often as needed.
    """

    def __init__(self, selection: Selection, *, seed: int, seed_framework: Seed) -> None:
        """Check that the data set can be used; ``seed_framework`` seeds the framework's generators.

        Raises:
            ScriptError: it has no length or no items, fewer samples than one update needs, or an order that cannot be followed.
        """
        check_dataset(selection.dataset, call="session.batches")
        self.dataset = selection.dataset
        self.length: int = len(selection.dataset)
        self._seed = seed
        self._collate = selection.collate or trees.collate
        self._reader = SeededReader(selection.dataset, seed=seed, seed_framework=seed_framework)
        self._workers: Workers | None = None
        self._epochs = Epochs(selection, seed=seed, seed_framework=seed_framework)
        self._marks: dict[int, int] = {}
        self._beside: Sequence[Samples] = ()
        self._join: Callable[[Sequence[Any]], Any] = tuple

    def read_with(self, others: Sequence["Samples"], join: Callable[[Sequence[Any]], Any]) -> None:
        """Read further data sets beside this one, in batches of one length each; ``join`` makes one batch of those of all."""
        self._beside, self._join = others, join

    def use_workers(self, count: int) -> None:
        """Read samples in ``count`` processes of their own.

        Raises:
            ScriptError: the data set or ``collate`` cannot be sent to them.
        """
        self._workers = Workers(count, self.dataset, self._collate, seed=self._seed)

    @property
    def updates_per_epoch(self) -> int | None:
        """See ``Reading.updates_per_epoch``."""
        return self._epochs.count(0) if self._epochs.is_even else None

    def updates_of(self, epochs: int) -> int:
        """Return the number of updates of the first ``epochs`` epochs."""
        return super().updates_of(epochs) if self._epochs.is_even else sum(map(self._epochs.count, range(epochs)))

    def place(self, update: int) -> tuple[int, int]:
        """Return (epoch, position) of an update of the job."""
        if self._epochs.is_even:
            return super().place(update)
        epoch = 0
        while update >= self._epochs.count(epoch):
            update -= self._epochs.count(epoch)
            epoch += 1
        return epoch, update

    def size(self, epoch: int, position: int) -> int:
        """Return the number of samples of an update over all ranks."""
        ends = self._epochs.ends(epoch)
        return int(ends[position] - (ends[position - 1] if position else 0))

    def ends_after(self, progress: Progress) -> bool:
        """Return whether this rank has no further update in its epoch."""
        return progress.position + 1 == self._epochs.count(progress.epoch)

    def order(self, epoch: int) -> int:
        """Return a checksum of the orders in which the data sets are read during ``epoch``."""
        # The reader may be in the next epoch already, whose order is compared when its own updates are made.
        self._marks = {read: mark for read, mark in self._marks.items() if read >= epoch}
        own = self._marks.get(epoch, 0)
        if not self._beside:
            return own
        update = self.updates_of(epoch)
        return zlib.crc32(repr([own, *(each.order(each.place(update)[0]) for each in self._beside)]).encode())

    def micro_batches(self, epoch: int, start: int, *, shares: Shares) -> Generator[Any, None, None]:
        """Yield the micro batches of this rank from update ``start`` to the end of the epoch.

        Raises:
            ScriptError: the length of the data set has changed, or a sample cannot be used.
        """
        if not self._beside:
            yield from self._read(epoch, start, shares)
            return
        # Number of the update in the job, by which each of the others finds its own place.
        update = self.updates_of(epoch) + start
        readers = [self._read(epoch, start, shares), *(each._read_on(update, shares) for each in self._beside)]
        try:
            for micros in zip(*readers, strict=False):  # the first one ends the epoch
                yield self._join(micros)
        finally:
            for reader in readers:
                reader.close()

    def _read(self, epoch: int, start: int, shares: Shares) -> Generator[Any, None, None]:
        """Yield the micro batches of this data set alone."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if len(self.dataset) != self.length:
            raise ScriptError(
                f"session.batches: the data set had {self.length} samples at the start and has {len(self.dataset)} in epoch "
                f"{epoch}; keep its length, so that epochs can be divided among ranks and resumed"
            )
        requests = self._requests(epoch, start, shares)
        try:
            if self._workers is not None:
                yield from self._workers.read(requests)
                return
            yield from map(self._collate, self._reader.batches(epoch, (numbers for _, numbers in requests)))
        except DataError as error:
            raise ScriptError(f"session.batches: {error}") from error

    def _read_on(self, update: int, shares: Shares) -> Generator[Any, None, None]:
        """Yield the micro batches of this data set from ``update`` on, without end."""
        first, start = self.place(update)
        for epoch in itertools.count(first):
            yield from self._read(epoch, start if epoch == first else 0, shares)

    def _requests(self, epoch: int, start: int, shares: Shares) -> Iterator[Request]:
        """Yield the sample numbers of this rank's micro batches."""
        order = self._epochs.order(epoch)
        self._marks[epoch] = zlib.crc32(order.tobytes())
        ends = self._epochs.ends(epoch)
        for update in range(start, len(ends)):
            for share in shares.spread(order[ends[update - 1] if update else 0 : ends[update]]):
                yield epoch, [int(index) for index in share]

    def close(self) -> None:
        """End the processes that read samples."""
        for each in self._beside:
            each.close()
        if self._workers is not None:
            self._workers.close()

    def sample(self, epoch: int, number: int) -> Any:
        """Return one sample, read with the random numbers of (seed, epoch, number)."""
        return self._reader.sample(epoch, number)

    def check_repeatable(self) -> None:
        """Refuse an order or a data set that returns different values for the same (seed, epoch, index).

        Raises:
            ScriptError: it does, so a resumed job could not continue to the same weights.
        """
        self._epochs.check_repeatable()
        index = first_unrepeatable(lambda number: self.sample(0, number), self.length)
        if index is not None:
            raise ScriptError(
                f"session.batches: sample {index} differs when it is read twice with the same seeds, so a resumed job would "
                "train on other data; draw random numbers from random, numpy.random or the framework, give the data set "
                "a method set_random_seed(seed), or accept it with nondeterministic='allow'"
            )
        # Samples that drew nothing while they were read twice are seeded by the batch from now on, which is much faster.
        self._reader.trust()


def check_dataset(dataset: Any, *, call: str) -> None:
    """Refuse a data set without a length or without items.

    Raises:
        ScriptError: it lacks one of them.
    """
    if problem := unusable(dataset):
        raise ScriptError(f"{call}: {problem}")
