"""Functions that combine a collective's two methods, and the collective of a job with only one rank."""

from typing import Any, Literal, TypeVar

import numpy as np

from mtrain.core.interfaces import Collective, Tensor
from mtrain.core.ranks.serialization import pack, unpack
from mtrain.errors import SpecError

T = TypeVar("T")
PART_BYTES = 64 << 20
"""Most bytes that all ranks together exchange at a time, where the first one alone needs the whole."""


class OneRank:
    """The collective of a job with one rank, where every reduction returns the value itself."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """Return a copy of ``x``, for every ``op``."""
        return x.copy() if isinstance(x, np.ndarray) else x.detach().clone()

    def all_gather(self, value: T) -> list[T]:
        """Return ``[value]``."""
        return [value]


class OneShardOnly:
    """The collective that models receive where a rank computes several shards in turn: it exchanges nothing."""

    def __init__(self, collective: Collective) -> None:
        self.rank, self.size = collective.rank, collective.size

    def all_reduce(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """Refuse to exchange.

        Raises:
            SpecError: always; other ranks compute other shards at the same time, so the result would depend on them.
        """
        raise SpecError(
            "the model exchanges values between ranks, which a rank that computes several shards in turn cannot do; give "
            "cluster.sharing=ranks, or as many ranks as shards (cluster.shards)"
        )

    def all_gather(self, value: T) -> list[T]:
        """Refuse to exchange, like ``all_reduce``."""
        self.all_reduce(value, "sum")
        return [value]


def broadcast(collective: Collective, value: T, *, source: int = 0) -> T:
    """Return the value of rank ``source`` on every rank. The value must be picklable; every rank must call."""
    mine: Any = value if collective.rank == source else None
    chosen: T = collective.all_gather(mine)[source]
    return chosen


def gather_on_first(collective: Collective, value: T) -> list[T]:
    """Return the values of all ranks on the first one, and nothing on the others. Every rank must call.

    The others hold no more than ``PART_BYTES`` of what they are sent, which they drop, and the first one has its own value once.
    """
    own = pack(value) if collective.rank else b""
    longest = max(collective.all_gather(len(own)))
    received = [bytearray() for _ in range(collective.size)]
    # In parts: ``all_gather`` gives every rank everything, and the others would have to hold it.
    length = max(1, PART_BYTES // max(1, collective.size - 1))
    for begin in range(0, longest, length):
        parts = collective.all_gather(own[begin : begin + length])
        if collective.rank == 0:
            for whole, part in zip(received, parts, strict=True):
                whole += part
    if collective.rank:
        return []
    received.reverse()
    received.pop()
    values = [value]
    while received:  # Each is dropped as soon as it is read.
        values.append(unpack(bytes(received.pop())))
    return values


def barrier(collective: Collective) -> None:
    """Return once every rank has called this function."""
    collective.all_gather(None)


def mean(collective: Collective, values: dict[str, float]) -> dict[str, float]:
    """Return the mean of each value over all ranks. Every rank must call, with the same names in the same order."""
    if not values:
        return {}
    array = np.array([values[name] for name in values], dtype=np.float64)
    reduced = collective.all_reduce(array, "mean")
    return {name: float(x) for name, x in zip(values, reduced, strict=True)}


def differing(collective: Collective, value: object) -> list[int]:
    """Return the ranks whose ``value`` differs from that of rank 0. Every rank must call, and gets the same list."""
    everyone = collective.all_gather(value)
    return [rank for rank, other in enumerate(everyone) if other != everyone[0]]
