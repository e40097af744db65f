"""Communication among the ranks of a job."""

from abc import abstractmethod
from typing import Literal, Protocol

from mtrain.core.interfaces.tensors import T, Tensor


class Collective(Protocol):
    """Communication among the ranks of one job. Every rank must make the same calls in the same order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """Reduce ``x`` over all ranks, element by element, and return a new tensor, equal on every rank.

        The result carries no gradient. A numpy array is reduced on the host, without waiting for the device, and the
        result is a numpy array.
        """
        ...

    @abstractmethod
    def all_gather(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, ordered by rank. Any picklable value is accepted."""
        ...
