"""What every collective offers beyond its two primitives, and the collective of a job of one rank."""

import copy
from typing import Any, Literal, TypeVar

import numpy as np

from mtrain.core.interfaces import Collective, Tensor

T = TypeVar("T")


class OneRank:
    """The collective of a job of one rank: every reduction is the value itself."""

    rank = 0
    local_rank = 0
    size = 1

    def all_reduce(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """A copy of ``x``, whatever ``op``."""
        return x.copy() if isinstance(x, np.ndarray) else copy.deepcopy(x.detach() if hasattr(x, "detach") else x)

    def all_gather(self, value: T) -> list[T]:
        """``[value]``."""
        return [value]


def broadcast(collective: Collective, value: T, *, source: int = 0) -> T:
    """The value of rank ``source``, on every rank. Any picklable; every rank calls."""
    mine: Any = value if collective.rank == source else None
    chosen: T = collective.all_gather(mine)[source]
    return chosen


def barrier(collective: Collective) -> None:
    """Return once every rank has called."""
    collective.all_gather(None)


def mean(collective: Collective, values: dict[str, float]) -> dict[str, float]:
    """Mean over ranks of each value. Every rank gives the same names; every rank calls."""
    if not values:
        return {}
    array = np.array([values[name] for name in values], dtype=np.float64)
    reduced = collective.all_reduce(array, "mean")
    return {name: float(x) for name, x in zip(values, reduced, strict=True)}


def differing(collective: Collective, value: object) -> list[int]:
    """Ranks whose ``value`` is not rank 0's; empty where all agree. Every rank calls, every rank gets the same list."""
    everyone = collective.all_gather(value)
    return [rank for rank, other in enumerate(everyone) if other != everyone[0]]
