"""The order of samples that a script gives in place of mtrain's own."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mtrain.core.samples.permutation import Indices
from mtrain.core.samples.sampler import repetitions
from mtrain.data.objects import Seed, seed_everything
from mtrain.errors import ScriptError

Order = Callable[[int], Sequence[int]]
"""Maps an epoch to the numbers of its samples."""


class OwnOrder:
    """The order that a script gives: the numbers of an epoch are its samples, however many there are.

    Repetition ``k`` (from 0) of a number within an epoch is ``number + k * length``, so that each is varied differently.
    Before the function is called the random generators are seeded by (seed, epoch), so that samplers which draw from them
    give every rank the same numbers, also after a resume.
    """

    def __init__(
        self,
        order: Order,
        dataset: Any,
        *,
        updates_of: Callable[[int], int] | None,
        seed: int,
        seed_framework: Seed,
    ) -> None:
        """Ask for the numbers of epoch 0, which say how many updates an epoch has.

        ``updates_of``: maps the number of an epoch's samples to that of its updates, which must be equal for all epochs; None: each
        epoch may have as many as it likes.

        Raises:
            ScriptError: it is no function, or its numbers cannot be used.
        """
        if not callable(order):
            raise ScriptError(
                f"session.batches: order={type(order).__name__} given; expected a function from the epoch to the numbers of its "
                "samples, such as order=lambda epoch: list(sampler)"
            )
        self._order = order
        self._dataset = dataset
        self._length = len(dataset)
        self._updates_of = updates_of
        self._seed = seed
        self._seed_framework = seed_framework
        self._cached: tuple[int, Indices] | None = None
        self.updates_per_epoch = None if updates_of is None else updates_of(len(self._ask_function(0)))
        """Number of updates of each epoch; None: epochs may differ."""

    def permutation(self, epoch: int) -> Indices:
        """Return the numbers of the samples (int64) in the order of ``epoch``. Only the most recent result is cached.

        Raises:
            ScriptError: they are no numbers of samples, or make another number of updates than those of epoch 0.
        """
        if self._cached is None or self._cached[0] != epoch:
            numbers = self._ask_function(epoch)
            updates = None if self._updates_of is None else self._updates_of(len(numbers))
            if updates != self.updates_per_epoch:
                raise ScriptError(
                    f"session.batches: `order` gave {len(numbers)} numbers for epoch {epoch}, which are {updates} updates, but epoch "
                    f"0 has {self.updates_per_epoch}; give each epoch as many, so that the job has a known end and can be resumed"
                )
            self._cached = (epoch, numbers + repetitions(numbers) * self._length)
        return self._cached[1]

    def forget(self) -> None:
        """Ask again for the numbers of the next epoch that is wanted."""
        self._cached = None

    def check_repeatable(self) -> None:
        """Refuse a function that gives other numbers for the same epoch.

        Raises:
            ScriptError: it does, so a resumed job could not continue to the same weights.
        """
        if not np.array_equal(self._ask_function(0), self._ask_function(0)):
            raise ScriptError(
                "session.batches: `order` differs when it is called twice for epoch 0, so ranks would read other samples and a "
                "resumed job would train on other data; draw the numbers from generators that are seeded by the epoch, such as "
                "np.random.default_rng(epoch), or accept it with nondeterministic='allow'"
            )

    def _ask_function(self, epoch: int) -> Indices:
        """Return what the function gives, as checked numbers."""
        seed_everything(self._dataset, (self._seed, epoch), self._seed_framework)
        given = self._order(epoch)
        try:
            plain = [_plain(number) for number in given]
            numbers = np.asarray(plain) if plain else np.empty(0, dtype=np.int64)
        except (TypeError, ValueError):
            numbers = np.empty(0, dtype=np.float64)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise ScriptError(
                f"session.batches: `order` gave a {type(given).__name__} for epoch {epoch}; expected the numbers of samples, "
                "whole numbers one after the other, such as list(sampler)"
            )
        wrong = np.flatnonzero((numbers < 0) | (numbers >= self._length))
        if wrong.size:
            raise ScriptError(
                f"session.batches: `order` gave the number {numbers[wrong[0]]} at place {wrong[0]} of epoch {epoch}; the data set "
                f"has {self._length} samples, expected 0 to {self._length - 1}"
            )
        return numbers.astype(np.int64)


def _plain(number: Any) -> Any:
    """Return a number of numpy or a framework as one of Python."""
    return number.item() if hasattr(number, "item") else number
