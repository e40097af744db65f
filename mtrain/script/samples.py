"""Read a script's data set: which samples this rank gets, in which order, with which random numbers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Collective
from mtrain.core.sampler import Shuffled, rank_share
from mtrain.data import trees
from mtrain.data.objects import Seed, first_unrepeatable, seeded_sample, unusable
from mtrain.errors import DataError, ScriptError
from mtrain.script.workers import Request, Workers

Order = Callable[[int], Sequence[int]]
"""Maps an epoch to the order of its samples."""


class Samples:
    """The samples of a data set in the order of a job, as a function of (seed, epoch, index) alone.

    Before each sample, the random generators of Python, numpy and the framework are seeded by (seed, epoch, index), so
    that augmentation repeats for every number of ranks and after every resume.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        seed: int,
        order: Order | None,
        collate: Callable[[Sequence[Any]], Any] | None,
        seed_framework: Seed,
    ) -> None:
        """Check that the data set can be used.

        Raises:
            ScriptError: it has no length or no items, or fewer samples than one update needs.
        """
        check_dataset(dataset, call="session.batches")
        self.dataset = dataset
        self.length = len(dataset)
        self.global_batch = global_batch
        self._seed = seed
        self._own_order = order
        self._collate = collate or trees.collate
        self._seed_framework = seed_framework
        if self.length < global_batch:
            raise ScriptError(
                f"session.batches: global_batch={global_batch}, but the data set has {self.length} samples; use at most "
                f"{self.length}"
            )
        self._workers: Workers | None = None
        self._shuffled = Shuffled(self.length, global_batch=global_batch, seed=seed)

    def use_workers(self, count: int) -> None:
        """Read samples in ``count`` processes of their own.

        Raises:
            ScriptError: the data set or ``collate`` cannot be sent to them.
        """
        self._workers = Workers(count, self.dataset, self._collate, seed=self._seed)

    @property
    def updates_per_epoch(self) -> int:
        """Number of complete global batches in one epoch."""
        return self.length // self.global_batch

    def ends_after(self, epoch: int, position: int) -> bool:
        """Return whether update ``position`` is the last one of its epoch."""
        return position + 1 == self.updates_per_epoch

    def state_before(self, epoch: int, position: int) -> Any:
        """Return nothing: which samples form an update needs no state."""

    def micro_batches(self, epoch: int, start: int, *, collective: Collective, accumulate: int) -> Iterator[Any]:
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
        requests = self._requests(epoch, start, collective=collective, accumulate=accumulate)
        try:
            if self._workers is not None:
                yield from self._workers.read(requests)
                return
            for _, indices in requests:
                yield self._collate([self.sample(epoch, index) for index in indices])
        except DataError as error:
            raise ScriptError(f"session.batches: {error}") from error

    def close(self) -> None:
        """End the processes that read samples."""
        if self._workers is not None:
            self._workers.close()

    def _requests(self, epoch: int, start: int, *, collective: Collective, accumulate: int) -> Iterator[Request]:
        """Yield the sample numbers of this rank's micro batches."""
        order = self._order(epoch)
        for update in range(start, self.updates_per_epoch):
            batch = order[update * self.global_batch : (update + 1) * self.global_batch]
            for share in rank_share(batch, rank=collective.rank, size=collective.size, accumulate=accumulate):
                yield epoch, [int(index) for index in share]

    def _order(self, epoch: int) -> Any:
        if self._own_order is None:
            return self._shuffled.permutation(epoch)
        order = np.asarray(list(self._own_order(epoch)), dtype=np.int64)
        if len(order) < self.updates_per_epoch * self.global_batch:
            raise ScriptError(
                f"session.batches: `order` gave {len(order)} numbers for epoch {epoch}; expected at least "
                f"{self.updates_per_epoch * self.global_batch}"
            )
        return order

    def sample(self, epoch: int, index: int) -> Any:
        """Return one sample, read with the random numbers of (seed, epoch, index)."""
        return seeded_sample(self.dataset, index, (self._seed, epoch, index), self._seed_framework)

    def check_repeatable(self) -> None:
        """Refuse a data set that returns different values for the same (seed, epoch, index).

        Raises:
            ScriptError: it does, so a resumed job could not continue to the same weights.
        """
        index = first_unrepeatable(lambda number: self.sample(0, number), self.length)
        if index is not None:
            raise ScriptError(
                f"session.batches: sample {index} differs when it is read twice with the same seeds, so a resumed job would "
                "train on other data; draw random numbers from random, numpy.random or the framework, give the data set "
                "a method set_random_seed(seed), or accept it with nondeterministic='allow'"
            )


def check_dataset(dataset: Any, *, call: str) -> None:
    """Refuse a data set without a length or without items.

    Raises:
        ScriptError: it lacks one of them.
    """
    if problem := unusable(dataset):
        raise ScriptError(f"{call}: {problem}")
