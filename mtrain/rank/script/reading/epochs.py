"""The epochs of a script's data set: the numbers of their samples in order, cut into the global batches of updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtrain.core.samples.permutation import Indices, Permutation
from mtrain.core.samples.sampler import Shuffled
from mtrain.data.objects import Seed
from mtrain.errors import ScriptError
from mtrain.rank.script.reading.order import Order, OwnOrder

BatchOf = Callable[[int], int]
"""Maps an epoch to the samples of each of its updates."""
Batches = Callable[[int], Sequence[Sequence[int]]]
"""Maps an epoch to the numbers of the samples of each of its updates."""


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """What a script says about the order of samples and the batches that it is cut into."""

    batch: int | BatchOf
    """Samples of an update; not used with ``batches``."""
    order: Order | None = None
    """The script's own; None: mtrain's."""
    batches: Batches | None = None
    """Of the script's own batch sampler, in place of both."""
    drops_last: bool = True
    """Whether a last shorter batch of an epoch is left out."""


class Epochs(Protocol):
    """Which samples each update of an epoch takes, as a function of the epoch."""

    @property
    def is_even(self) -> bool:
        """Tell whether every epoch has as many updates, each of as many samples but perhaps the last."""
        ...

    def count(self, epoch: int) -> int:
        """Return the number of updates of an epoch, 1 or more."""
        ...

    def order(self, epoch: int) -> Indices | Permutation:
        """Return the numbers of its samples (int64); ``number + k * length`` is repetition ``k`` of a number."""
        ...

    def ends(self, epoch: int) -> Indices:
        """Return where in the order each update ends (int64)."""
        ...

    def check_repeatable(self) -> None:
        """Refuse an epoch whose samples are others when they are asked for again."""
        ...


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


class Cut:
    """An order that is cut into batches of one length, which may depend on the epoch."""

    def __init__(self, order: Shuffled | OwnOrder, batch: int | BatchOf, *, drops_last: bool) -> None:
        """``drops_last``: a last shorter batch of an epoch is left out."""
        self._order = order
        self._batch = batch
        self._drops_last = drops_last
        self._ends: dict[int, Indices] = {}
        """Of the first epoch and the one that was asked for last: the loop asks several times in each update."""

    @property
    def is_even(self) -> bool:
        """See ``Epochs.is_even``."""
        return not callable(self._batch)

    def _length(self, epoch: int) -> int:
        """Return the number of the samples of an epoch."""
        return self._order.length if isinstance(self._order, Shuffled) else len(self._order.permutation(epoch))

    def ends(self, epoch: int) -> Indices:
        """See ``Epochs.ends``.

        Raises:
            ScriptError: see ``batch_at``.
        """
        if epoch not in self._ends:
            self._ends = {known: ends for known, ends in self._ends.items() if known == 0} | {epoch: self._cut(epoch)}
        return self._ends[epoch]

    def _cut(self, epoch: int) -> Indices:
        length, batch = self._length(epoch), self._batch
        if callable(batch):
            batch = batch_at(batch, epoch, length)
        last = length if self._drops_last else length + batch - 1
        return np.minimum(np.arange(batch, last + 1, batch, dtype=np.int64), length)

    def count(self, epoch: int) -> int:
        """See ``Epochs.count``."""
        return len(self.ends(0 if self.is_even else epoch))

    def order(self, epoch: int) -> Indices | Permutation:
        """See ``Epochs.order``."""
        return self._order.permutation(epoch)

    def check_repeatable(self) -> None:
        """See ``Epochs.check_repeatable``."""
        if isinstance(self._order, OwnOrder):
            self._order.check_repeatable()


class OwnBatches:
    """The batches that a script's own batch sampler makes, each of any length."""

    is_even = False

    def __init__(self, batches: Batches, dataset: Any, *, seed: int, seed_framework: Seed) -> None:
        self._batches = batches
        self._lengths: dict[int, list[int]] = {}
        """Lengths of the batches of the epoch that was asked for last."""
        self._counts: dict[int, int] = {}
        self._order = OwnOrder(self._flat, dataset, updates_of=None, seed=seed, seed_framework=seed_framework)

    def _flat(self, epoch: int) -> list[int]:
        batches = [list(batch) for batch in self._batches(epoch)]
        if not batches or not all(batches):
            what = "no batch" if not batches else f"an empty batch, number {[len(x) for x in batches].index(0)},"
            raise ScriptError(
                f"session.batches: the batch sampler gave {what} in epoch {epoch}; expected one with a sample"
            )
        self._lengths = {epoch: [len(batch) for batch in batches]}
        expected = self._counts.setdefault(epoch, self._ask_length(epoch) or len(batches))
        if expected != len(batches):
            raise ScriptError(
                f"session.batches: the batch sampler has a length of {expected}, but gave {len(batches)} batches for epoch {epoch}; "
                "correct its __len__, so that the job has a known end and can be resumed"
            )
        return [number for batch in batches for number in batch]

    def _ask_length(self, epoch: int) -> int | None:
        """Return how many batches the sampler says that an epoch has; None: it does not say."""
        told: int | None = getattr(self._batches, "count", lambda epoch: None)(epoch)
        return told

    def count(self, epoch: int) -> int:
        """See ``Epochs.count``."""
        if epoch not in self._counts:
            if told := self._ask_length(epoch):
                self._counts[epoch] = told
            else:
                self._order.permutation(epoch)
        return self._counts[epoch]

    def order(self, epoch: int) -> Indices:
        """See ``Epochs.order``."""
        return self._order.permutation(epoch)

    def ends(self, epoch: int) -> Indices:
        """See ``Epochs.ends``."""
        self._order.permutation(epoch)
        if epoch not in self._lengths:
            self._order.forget()
            self._order.permutation(epoch)
        return np.cumsum(self._lengths[epoch], dtype=np.int64)

    def check_repeatable(self) -> None:
        """See ``Epochs.check_repeatable``."""
        self._order.check_repeatable()


def epochs_of(dataset: Any, cutting: Cutting, *, seed: int, seed_framework: Seed) -> Epochs:
    """Return the epochs of a data set; ``seed_framework`` seeds the framework's generators, from which an order may draw.

    Raises:
        ScriptError: there are fewer samples than one update needs, or the order cannot be followed.
    """
    batch, order, drops_last = cutting.batch, cutting.order, cutting.drops_last
    if cutting.batches is not None:
        return OwnBatches(cutting.batches, dataset, seed=seed, seed_framework=seed_framework)
    length = len(dataset)
    if order is None:
        if not callable(batch) and drops_last and length < batch:
            raise ScriptError(
                f"session.batches: global_batch={batch}, but the data set has {length} samples; use at most {length}"
            )
        # The permutation does not depend on the batch.
        return Cut(Shuffled(length, global_batch=1, seed=seed), batch, drops_last=drops_last)

    def updates_of(samples: int) -> int:
        assert not callable(batch)
        return samples // batch if drops_last else -(-samples // batch)

    own = OwnOrder(
        order, dataset, updates_of=None if callable(batch) else updates_of, seed=seed, seed_framework=seed_framework
    )
    if not callable(batch) and own.updates_per_epoch == 0:
        raise ScriptError(
            f"session.batches: `order` gave {len(own.permutation(0))} numbers for epoch 0, and global_batch={batch}; expected at least "
            f"{batch if drops_last else 1}"
        )
    return Cut(own, batch, drops_last=drops_last)
