"""The epochs of a script's data set: the numbers of their samples in order, cut into the global batches of updates."""

from typing import Any

import numpy as np

from mtrain.core.samples.permutation import Indices, Permutation
from mtrain.core.samples.sampler import Shuffled, repetitions
from mtrain.data.objects import Seed, seed_everything
from mtrain.errors import ScriptError
from mtrain.rank.script.reading.loaders import BatchOf, Selection


class Epochs:
    """Which samples each update of an epoch takes, as a function of the epoch.

    The order is mtrain's, or that of the script's function ``order`` or ``batches``, which may give any number of samples.
    """

    def __init__(self, selection: Selection, *, seed: int, seed_framework: Seed) -> None:
        """``seed_framework`` seeds the framework's generators, from which an order may draw.

        Raises:
            ScriptError: there are fewer samples than one update needs, or the order cannot be followed.
        """
        self._selection = selection
        self._length = len(selection.dataset)
        self._seed, self._seed_framework = seed, seed_framework
        self._cached: tuple[int, Indices] | None = None
        """The epoch that the script's function was asked for last, and its numbers."""
        self._ends: dict[int, Indices] = {}
        self._counts: dict[int, int] = {}
        """Numbers of batches that the script's own batch sampler has said or shown, by epoch."""
        batch, order, drops_last = selection.batch, selection.order, selection.drops_last
        self.is_even = selection.batches is None and not callable(batch)
        """Whether every epoch has as many updates, each of as many samples but perhaps the last."""
        self._shuffled: Shuffled | None = None
        if selection.batches is None and order is None:
            if isinstance(batch, int) and drops_last and self._length < batch:
                raise ScriptError(
                    f"session.batches: global_batch={batch}, but the data set has {self._length} samples; use at most {self._length}"
                )
            # The permutation does not depend on the batch.
            self._shuffled = Shuffled(self._length, global_batch=1, seed=seed)
        elif selection.batches is None and not callable(order):
            raise ScriptError(
                f"session.batches: order={type(order).__name__} given; expected a function from the epoch to the numbers of its "
                "samples, such as order=lambda epoch: list(sampler)"
            )
        elif self.is_even:
            # Asked at once, though it is asked again for the epoch: a loop of unknown length cannot be started.
            numbers, ends = self._ask(0)
            self._updates = len(ends)
            if not self._updates:
                raise ScriptError(
                    f"session.batches: `order` gave {len(numbers)} numbers for epoch 0, and global_batch={batch}; expected at least "
                    f"{batch if drops_last else 1}"
                )

    def order(self, epoch: int) -> Indices | Permutation:
        """Return the numbers of the samples of an epoch (int64); repetition ``k`` of a number is ``number + k * length``.

        So each repetition is varied differently. Only the most recent result is kept.

        Raises:
            ScriptError: they are no numbers of samples, or make another number of updates than those of epoch 0.
        """
        if self._shuffled is not None:
            return self._shuffled.permutation(epoch)
        if self._cached is None or self._cached[0] != epoch:
            numbers, ends = self._ask(epoch)
            if self.is_even and len(ends) != self._updates:
                raise ScriptError(
                    f"session.batches: `order` gave {len(numbers)} numbers for epoch {epoch}, which are {len(ends)} updates, but epoch "
                    f"0 has {self._updates}; give each epoch as many, so that the job has a known end and can be resumed"
                )
            self._keep_ends(epoch, ends)
            self._cached = (epoch, numbers + repetitions(numbers) * self._length)
        return self._cached[1]

    def ends(self, epoch: int) -> Indices:
        """Return where in the order each update ends (int64).

        Raises:
            ScriptError: see ``order``, and ``batch_at``.
        """
        epoch = 0 if self.is_even else epoch
        if epoch not in self._ends:
            if self._shuffled is None:
                self.order(epoch)
            else:
                self._keep_ends(epoch, self._cut(self._length, epoch))
        return self._ends[epoch]

    def count(self, epoch: int) -> int:
        """Return the number of updates of an epoch, 1 or more."""
        if self._selection.batches is None:
            return len(self.ends(epoch))
        # A sampler that has a length is not iterated for it: that may take long, and `place` counts all former epochs.
        if epoch not in self._counts:
            self._counts[epoch] = self._ask_length(epoch) or len(self.ends(epoch))
        return self._counts[epoch]

    def check_repeatable(self) -> None:
        """Refuse a function that gives other numbers for the same epoch.

        Raises:
            ScriptError: it does, so a resumed job could not continue to the same weights.
        """
        if self._shuffled is None and not np.array_equal(self._ask(0)[0], self._ask(0)[0]):
            raise ScriptError(
                "session.batches: `order` differs when it is called twice for epoch 0, so ranks would read other samples and a "
                "resumed job would train on other data; draw the numbers from generators that are seeded by the epoch, such as "
                "np.random.default_rng(epoch), or accept it with nondeterministic='allow'"
            )

    def _keep_ends(self, epoch: int, ends: Indices) -> None:
        """Keep the ends of an epoch, of its neighbours and of the first one.

        The loop asks several times in each update, while the reader may be in the next epoch already.
        """
        self._ends = {known: it for known, it in self._ends.items() if known == 0 or abs(known - epoch) == 1}
        self._ends[epoch] = ends

    def _cut(self, length: int, epoch: int) -> Indices:
        """Return the ends of batches of one length, which may depend on the epoch, in an epoch of ``length`` samples."""
        batch = self._selection.batch
        if callable(batch):
            batch = batch_at(batch, epoch, length)
        last = length if self._selection.drops_last else length + batch - 1
        return np.minimum(np.arange(batch, last + 1, batch, dtype=np.int64), length)

    def _ask(self, epoch: int) -> tuple[Indices, Indices]:
        """Ask the script's function for an epoch; return its checked numbers, and where each update ends."""
        # Samplers that draw give every rank the same numbers, also after a resume.
        seed_everything(self._selection.dataset, (self._seed, epoch), self._seed_framework)
        if self._selection.batches is None:
            assert self._selection.order is not None
            numbers = self._check_numbers(self._selection.order(epoch), epoch)
            return numbers, self._cut(len(numbers), epoch)
        batches = [list(batch) for batch in self._selection.batches(epoch)]
        if not batches or not all(batches):
            what = "no batch" if not batches else f"an empty batch, number {[len(x) for x in batches].index(0)},"
            raise ScriptError(
                f"session.batches: the batch sampler gave {what} in epoch {epoch}; expected one with a sample"
            )
        expected = self._counts.setdefault(epoch, self._ask_length(epoch) or len(batches))
        if expected != len(batches):
            raise ScriptError(
                f"session.batches: the batch sampler has a length of {expected}, but gave {len(batches)} batches for epoch {epoch}; "
                "correct its __len__, so that the job has a known end and can be resumed"
            )
        numbers = self._check_numbers([number for batch in batches for number in batch], epoch)
        return numbers, np.cumsum([len(batch) for batch in batches], dtype=np.int64)

    def _ask_length(self, epoch: int) -> int | None:
        """Return how many batches the sampler says that an epoch has; None: it does not say."""
        said: int | None = getattr(self._selection.batches, "count", lambda epoch: None)(epoch)
        return said

    def _check_numbers(self, given: Any, epoch: int) -> Indices:
        """Return what the script's function gave, as numbers of samples."""
        try:
            # Numbers of numpy and of a framework become those of Python.
            plain = [number.item() if hasattr(number, "item") else number for number in given]
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


def batch_at(batch: BatchOf, epoch: int, length: int) -> int:
    """Return the samples of each update of an epoch of ``length`` samples.

    Raises:
        ScriptError: the function gives no number of samples.
    """
    given = batch(epoch)
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= length:
        raise ScriptError(
            f"session.batches: `global_batch` gave {given!r} for epoch {epoch}; expected a number of samples from 1 to {length}"
        )
    return given
