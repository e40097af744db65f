"""What a checkpoint holds: the state of the model and the optimizer, and how far the job has come."""

from dataclasses import dataclass, field
from typing import Literal

from mtrain.core.interfaces.tensors import Array


@dataclass(kw_only=True, slots=True)
class State:
    """Weights and optimizer state as whole numpy arrays, with the same names and shapes for every backend."""

    weights: dict[str, Array] = field(default_factory=dict)
    """Parameters and buffers. Where buffers differ between ranks, rank 0's are taken."""
    ema: dict[str, Array] = field(default_factory=dict)
    """Averaged parameters and float buffers but ``core.quantising.RANGE``; empty without EMA."""
    moments: dict[str, Array] = field(default_factory=dict)
    """``<moment>/<parameter name>``, see ``core.recipe.MOMENTS``."""
    counters: dict[str, float] = field(default_factory=dict)
    """``updates`` (optimizer steps taken), ``skipped``, ``skipped_in_a_row``, ``loss_scale``, ``loss_scale_age``."""


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
