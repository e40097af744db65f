"""Read a script's data set: which samples this rank gets, in which order, with which random numbers."""

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from mtrain.core.samples.permutation import Indices
from mtrain.core.samples.sampler import Shares
from mtrain.data import trees
from mtrain.data.objects import Seed, first_unrepeatable, unusable
from mtrain.data.seeded_reading import SeededReader
from mtrain.errors import DataError, ScriptError
from mtrain.rank.script.reading.epochs import Cutting, epochs_of
from mtrain.rank.script.reading.workers import Request, Workers


class Samples:
    """The samples of a data set in the order of a job, as a function of (seed, epoch, index) alone.

    Before each sample, the random generators of Python, numpy and the framework are seeded by (seed, epoch, index), so
    that augmentation repeats for every number of ranks and after every resume.
    """

    def __init__(
        self,
        dataset: Any,
        cutting: Cutting,
        *,
        seed: int,
        collate: Callable[[Sequence[Any]], Any] | None,
        seed_framework: Seed,
    ) -> None:
        """Check that the data set can be used.

        Raises:
            ScriptError: it has no length or no items, fewer samples than one update needs, or an order that cannot be followed.
        """
        check_dataset(dataset, call="session.batches")
        self.dataset = dataset
        self.length = len(dataset)
        self._seed = seed
        self._collate = collate or trees.collate
        self._reader = SeededReader(dataset, seed=seed, seed_framework=seed_framework)
        self._workers: Workers | None = None
        self.epochs = epochs_of(dataset, cutting, seed=seed, seed_framework=seed_framework)
        self._marks: dict[int, int] = {}
        self._read: dict[int, Indices] = {}
        """Where the updates of an epoch end, of the epoch that was asked for last."""

    def use_workers(self, count: int) -> None:
        """Read samples in ``count`` processes of their own.

        Raises:
            ScriptError: the data set or ``collate`` cannot be sent to them.
        """
        self._workers = Workers(count, self.dataset, self._collate, seed=self._seed)

    @property
    def updates_per_epoch(self) -> int | None:
        """Number of updates of each epoch; None: epochs differ."""
        return self.epochs.count(0) if self.epochs.is_even else None

    def updates_of(self, epochs: int) -> int:
        """Return the number of updates of the first ``epochs`` epochs."""
        each = self.updates_per_epoch
        return epochs * each if each is not None else sum(map(self.epochs.count, range(epochs)))

    def place(self, update: int) -> tuple[int, int]:
        """Return (epoch, position) of an update of the job."""
        if (each := self.updates_per_epoch) is not None:
            return divmod(update, each)
        epoch = 0
        while update >= self.epochs.count(epoch):
            update -= self.epochs.count(epoch)
            epoch += 1
        return epoch, update

    def _ends(self, epoch: int) -> Indices:
        if epoch not in self._read:
            self._read = {epoch: self.epochs.ends(0 if self.epochs.is_even else epoch)}
        return self._read[epoch]

    def size(self, epoch: int, position: int) -> int:
        """Return the number of samples of an update over all ranks."""
        ends = self._ends(epoch)
        return int(ends[position] - (ends[position - 1] if position else 0))

    def mark(self, epoch: int) -> int:
        """Return a checksum of the order of ``epoch``, by which ranks see that they read in the same one."""
        self._marks = {read: mark for read, mark in self._marks.items() if read >= epoch}
        return self._marks.get(epoch, 0)

    def ends_after(self, epoch: int, position: int) -> bool:
        """Return whether update ``position`` is the last one of its epoch."""
        return position + 1 == self.epochs.count(epoch)

    def state_before(self, epoch: int, position: int) -> Any:
        """Return nothing: which samples form an update needs no state."""

    def micro_batches(self, epoch: int, start: int, *, shares: Shares) -> Generator[Any, None, None]:
        """Yield the micro batches of this rank from update ``start`` to the end of the epoch.

        Raises:
            ScriptError: the length of the data set has changed, or a sample cannot be used.
        """
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

    def close(self) -> None:
        """End the processes that read samples."""
        if self._workers is not None:
            self._workers.close()

    def _requests(self, epoch: int, start: int, shares: Shares) -> Iterator[Request]:
        """Yield the sample numbers of this rank's micro batches."""
        order = self.epochs.order(epoch)
        self._marks[epoch] = zlib.crc32(order.tobytes())
        # Of this epoch, while the updates that are trained may still be those of the epoch before.
        ends = self.epochs.ends(0 if self.epochs.is_even else epoch)
        for update in range(start, len(ends)):
            for share in shares.spread(order[ends[update - 1] if update else 0 : ends[update]]):
                yield epoch, [int(index) for index in share]

    def sample(self, epoch: int, number: int) -> Any:
        """Return one sample, read with the random numbers of (seed, epoch, number)."""
        return self._reader.sample(epoch, number)

    def check_repeatable(self) -> None:
        """Refuse an order or a data set that returns different values for the same (seed, epoch, index).

        Raises:
            ScriptError: it does, so a resumed job could not continue to the same weights.
        """
        self.epochs.check_repeatable()
        index = first_unrepeatable(lambda number: self.sample(0, number), self.length)
        if index is not None:
            raise ScriptError(
                f"session.batches: sample {index} differs when it is read twice with the same seeds, so a resumed job would "
                "train on other data; draw random numbers from random, numpy.random or the framework, give the data set "
                "a method set_random_seed(seed), or accept it with nondeterministic='allow'"
            )
        self._reader.trust()


def check_dataset(dataset: Any, *, call: str) -> None:
    """Refuse a data set without a length or without items.

    Raises:
        ScriptError: it lacks one of them.
    """
    if problem := unusable(dataset):
        raise ScriptError(f"{call}: {problem}")
