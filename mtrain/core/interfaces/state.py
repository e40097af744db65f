"""What a checkpoint holds: the state of the model and the optimizer, and how far the job has come."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from mtrain.core.interfaces.tensors import Array

if TYPE_CHECKING:
    import numpy as np


@dataclass(kw_only=True, slots=True)
class State:
    """Weights and optimizer state as whole numpy arrays, with the same names and shapes for every backend.

    Its mappings may read an array from a file at each access, so whoever goes through them should hold one at a time.
    """

    weights: Mapping[str, Array] = field(default_factory=dict)
    """Parameters and buffers. Where buffers differ between ranks, rank 0's are taken."""
    ema: Mapping[str, Array] = field(default_factory=dict)
    """Averaged parameters and float buffers but ``core.network.quantising.RANGE``; empty without EMA."""
    moments: Mapping[str, Array] = field(default_factory=dict)
    """``<moment>/<parameter name>``, see ``core.update.recipe.MOMENTS``."""
    counters: dict[str, float] = field(default_factory=dict)
    """``updates`` (optimizer steps taken), ``skipped``, ``skipped_in_a_row``, ``loss_scale``, ``loss_scale_age``."""


Part = Literal["weights", "ema", "moments"]
"""A part of ``State`` that consists of arrays."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of an array before its values are: shape and type."""

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"


class StateStream(Protocol):
    """A ``State`` that is handed over array by array, so that no rank holds more than one whole array of it at a time.

    Every rank must read the same arrays in the same order, to the end of each call of ``arrays``: where arrays are split,
    the ranks send their parts to rank 0.
    """

    counters: dict[str, float]
    outlines: Mapping[Part, Mapping[str, Outline]]
    """Shapes and types of all arrays, by part and name; known on every rank before any array is read."""

    @abstractmethod
    def arrays(self, part: Part, names: Sequence[str]) -> Iterator[Array | None]:
        """Yield the arrays ``names`` of ``part`` on rank 0; other ranks may get None in place of each.

        An array may share memory with the model unless the stream was copied, and is C-contiguous. It should be dropped
        before the next one is read.
        """
        ...


@runtime_checkable
class SplitStream(StateStream, Protocol):
    """A stream of arrays that are split over ranks, each of which may write what it holds instead of sending it."""

    rank: int

    @abstractmethod
    def held(self, part: Part, names: Sequence[str]) -> Iterator[tuple[str, int, Array]]:
        """Yield what this rank contributes to the arrays ``names``: name, first element in the flattened array, 1-D values."""
        ...

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Return the plain values of all ranks, by rank. Every rank must call; in the thread that saves."""
        ...


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a job has come. ``update`` is the next update to run; it is number ``position`` of epoch ``epoch``."""

    update: int = 0
    epoch: int = 0
    position: int = 0
    best: float = float("-inf")
    best_epoch: int = -1
    epochs_without_gain: int = 0
    scored_update: int = -1
    """Value of ``update`` at the last evaluation; -1: none so far."""
    samples: int = 0
    skipped: int = 0
    """Updates that were not applied because their gradient was not finite."""
    skipped_in_a_row: int = 0


Why = Literal["due", "best", "requested", "ending"]
"""Why a checkpoint is written: the spec says so, its score is the best so far, somebody asked for it (SIGUSR1), or the
job ends because it was asked to."""
