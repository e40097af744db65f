"""Choose the samples of each update and rank, as pure functions of (seed, epoch, update) that no backend influences."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtrain.core.interfaces import Collective
from mtrain.core.samples.permutation import Indices, Permutation
from mtrain.errors import SpecError

LISTED = 1 << 24
"""Largest number of samples whose order is a list of all of them (128 MiB). That of more is a function of the position."""


class Shuffled:
    """Training order: each epoch is a new permutation, cut into global batches; a last incomplete one is dropped.

    Global batch ``i`` of an epoch depends on (length, global_batch, seed, epoch) alone, so it holds the same samples
    for every number of ranks and every accumulation.

    Raises:
        SpecError: there are fewer samples than one global batch needs.
    """

    def __init__(self, length: int, *, global_batch: int, seed: int) -> None:
        if length < global_batch:
            raise SpecError(
                f"train.batch_size: {global_batch} samples per update, but the training split has {length}; "
                f"use at most {length}"
            )
        self.length = length
        self.global_batch = global_batch
        self.seed = seed
        self._cached: tuple[int, Indices | Permutation] | None = None

    @property
    def updates_per_epoch(self) -> int:
        """Number of complete global batches in one epoch."""
        return self.length // self.global_batch

    def permutation(self, epoch: int) -> Indices | Permutation:
        """Return all sample indices (int64) in the order of ``epoch``, to be cut. Only the most recent result is cached."""
        if self.length > LISTED:
            return Permutation.of(self.length, seed=self.seed, epoch=epoch)
        if self._cached is None or self._cached[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            order = generator.permutation(self.length).astype(np.int64, copy=False)
            order.setflags(write=False)
            self._cached = (epoch, order)
        return self._cached[1]

    def global_batch_indices(self, epoch: int, update: int) -> Indices:
        """Return the ``global_batch`` sample indices (int64) of global batch ``update`` (0-based, within the epoch).

        Raises:
            IndexError: ``update`` is not in ``range(updates_per_epoch)``.
        """
        if not 0 <= update < self.updates_per_epoch:
            raise IndexError(f"update {update} is not in an epoch of {self.updates_per_epoch} updates")
        start = update * self.global_batch
        return self.permutation(epoch)[start : start + self.global_batch]


class Drawn(Shuffled):
    """Training order by weights: each epoch draws as many samples as there are, with replacement.

    A sample of twice the weight is drawn twice as often on average. The draws depend on (seed, epoch, weights) alone. The
    repetition number ``k`` (from 0) of a sample within an epoch has the index ``sample + k * length``, so that its source
    can vary each repetition differently.
    """

    def weigh(self, weights: npt.NDArray[np.float64]) -> None:
        """Set the weights, (length,): finite, none below 0, and at least one above."""
        if weights.shape != (self.length,):
            raise ValueError(f"weights of shape {weights.shape}, expected ({self.length},)")
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
            raise ValueError("weights must be finite numbers >= 0, and one of them above 0")
        self._cumulative = np.cumsum(weights, dtype=np.float64)
        self._cached = None

    def permutation(self, epoch: int) -> Indices | Permutation:
        """Return the indices (int64) drawn for ``epoch``, in order; ``weigh`` must have been called."""
        if self._cached is None or self._cached[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            points = generator.random(self.length) * self._cumulative[-1]
            # A product may round up to the sum itself, which belongs to the last sample with a weight.
            last = int(np.searchsorted(self._cumulative, self._cumulative[-1]))
            # Zeros in the weights leave flat steps in the sums, which ``side="right"`` passes over.
            drawn = np.minimum(np.searchsorted(self._cumulative, points, side="right"), last)
            order = (drawn + repetitions(drawn) * self.length).astype(np.int64)
            order.setflags(write=False)
            self._cached = (epoch, order)
        return self._cached[1]


def repetitions(drawn: Indices) -> Indices:
    """Return for each entry how many entries before it are equal to it."""
    order = np.argsort(drawn, kind="stable")
    ordered = drawn[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    counts = np.empty(len(drawn), dtype=np.int64)
    counts[order] = np.arange(len(drawn)) - starts
    return counts


def rank_share(indices: Indices, *, rank: int, size: int, accumulate: int) -> list[Indices]:
    """Return the micro batches of one rank, in order.

    Micro batch ``a`` is ``indices[(a*size + rank)*micro :][:micro]``.

    The micro batches ``a`` of all ranks together are the next ``size * micro`` samples of the global batch: those that
    a single rank with a micro batch of that size would get, and over which a synchronised BatchNorm normalises.

    Raises:
        SpecError: the global batch does not divide among ``size * accumulate``.
    """
    shares = size * accumulate
    if len(indices) % shares:
        raise SpecError(
            f"train.batch_size: {len(indices)} does not divide among {size} ranks x {accumulate} micro batches; "
            f"use {max(len(indices) // shares, 1) * shares} or {(len(indices) // shares + 1) * shares}"
        )
    micro = len(indices) // shares
    return [indices[(a * size + rank) * micro :][:micro] for a in range(accumulate)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Which shards of an update a rank computes, in which order, and how much each counts.

    Micro batch ``a`` of the job has ``shards`` shards. Rank ``r`` of ``size`` computes the shards ``r``, ``r + size``,
    and so on. Where ``size`` does not divide ``shards``, some ranks compute an empty one at the end: samples of another
    shard with weight 0, so that all ranks make as many passes. Rank 0 alone computes shard 0 of each micro batch, and
    computes it first.
    """

    rank: int
    size: int
    shards: int
    """Shards of each micro batch of the job."""
    rounds: int
    """Micro batches of the job per update."""

    @classmethod
    def even(cls, collective: Collective, *, rounds: int) -> "Shares":
        """Return the shares of a rank where each computes one shard of each of ``rounds`` micro batches."""
        return cls(rank=collective.rank, size=collective.size, shards=collective.size, rounds=rounds)

    @property
    def passes(self) -> int:
        """Forward passes of this rank per update."""
        return self.rounds * -(-self.shards // self.size)

    def shard(self, number: int) -> int:
        """Return the shard of the update (0 to ``rounds * shards - 1``) that pass ``number`` of this rank computes."""
        round_, place = self._place(number)
        # An empty pass computes samples of another shard, with weight 0, because all ranks make as many passes.
        return round_ * self.shards + place % self.shards

    def weight(self, number: int) -> float:
        """Return the factor of the loss in pass ``number``, with which the mean over passes and ranks is that over shards."""
        _, place = self._place(number)
        if place >= self.shards:
            return 0.0
        return self.passes * self.size / (self.rounds * self.shards)

    def moves_buffers(self, number: int) -> bool:
        """Return whether pass ``number`` moves running statistics: of each micro batch of the job its first shard does.

        On ranks other than 0 the first pass of each round does, which nobody reads.
        """
        return number % -(-self.shards // self.size) == 0

    def _place(self, number: int) -> tuple[int, int]:
        """Return the round of a pass, and its place among the shards; places from ``shards`` on are empty."""
        round_, turn = divmod(number, -(-self.shards // self.size))
        return round_, turn * self.size + self.rank

    def divide(self, indices: Indices) -> list[Indices]:
        """Return the indices of a global batch that each pass of this rank computes, in order.

        Raises:
            SpecError: the global batch does not divide among ``shards * rounds``.
        """
        whole = rank_share(indices, rank=0, size=1, accumulate=self.shards * self.rounds)
        return [whole[self.shard(number)] for number in range(self.passes)]

    def spread(self, indices: Indices) -> list[Indices]:
        """Return what each pass of this rank computes of a global batch of any length, in order.

        The first shards have one sample more where it does not divide evenly. A shard without a sample gets those of the first
        one, for which ``fill`` is 0. What ``divide`` returns is equal where that divides.
        """
        whole = np.array_split(indices, self.shards * self.rounds)
        shards = (whole[self.shard(number)] for number in range(self.passes))
        return [shard if len(shard) else whole[0] for shard in shards]

    def fill(self, number: int, length: int) -> float:
        """Return the samples of pass ``number`` of a global batch of ``length``, as a multiple of those of a mean shard.

        It is a factor of the loss, a mean over the shard, so that the mean over shards is that over samples; 1 exactly where
        ``length`` divides.
        """
        parts = self.shards * self.rounds
        each, rest = divmod(length, parts)
        return (each + (self.shard(number) < rest)) * parts / length


class Padded:
    """Evaluation order: every sample at least once, and the same number of full micro batches on every rank.

    Sample ``i`` is on rank ``i // micro_batch % size``. The last micro batches are filled up with the first samples,
    and the evaluator counts a repeated sample once.

    Raises:
        SpecError: the split is empty.
    """

    def __init__(self, length: int, *, size: int, micro_batch: int) -> None:
        if length < 1:
            raise SpecError("data.val: the evaluation split is empty; name one with at least one sample")
        self.length = length
        self.size = size
        self.micro_batch = micro_batch

    @property
    def batches_per_rank(self) -> int:
        """Number of micro batches of each rank."""
        return -(-self.length // (self.size * self.micro_batch))

    def micro_batches(self, rank: int) -> Iterator[Indices]:
        """Yield the micro batches of ``rank``: ``batches_per_rank`` arrays of ``micro_batch`` indices (int64)."""
        for step in range(self.batches_per_rank):
            first = (step * self.size + rank) * self.micro_batch
            # Past the end the first samples come again; the evaluator counts each once.
            yield np.arange(first, first + self.micro_batch, dtype=np.int64) % self.length
