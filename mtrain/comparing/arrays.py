"""Two jobs' last checkpoints, array by array."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtrain.core.checkpoint.store import load
from mtrain.core.interfaces import Array, State

SMALLEST = 1e-3
"""Arrays whose largest magnitude is below it are measured against it: a bias near zero is not a difference of 100%."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Farthest:
    """The array in which two jobs differ most."""

    name: str
    difference: float
    """Largest |a - b| over the largest |a|."""


def state_of(checkpoint: Path) -> State:
    """What a checkpoint holds.

    Raises:
        CheckpointError: it cannot be read.
    """
    return load(checkpoint).state


def farthest(a: State, b: State) -> dict[str, Farthest]:
    """Of weights (with buffers), averaged weights and moments; what one job lacks differs by inf."""
    pairs = {"weights": (a.weights, b.weights), "ema": (a.ema, b.ema), "moments": (a.moments, b.moments)}
    return {part: _farthest(one, other) for part, (one, other) in pairs.items() if one or other}


def _farthest(a: Mapping[str, Array], b: Mapping[str, Array]) -> Farthest:
    alone = sorted(a.keys() ^ b.keys())
    if alone:
        return Farthest(name=alone[0], difference=float("inf"))
    found = {name: _relative(a[name], b[name]) for name in a}
    name = max(found, key=lambda name: found[name])
    return Farthest(name=name, difference=found[name])


def _relative(a: Array, b: Array) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    gap = np.abs(a - b).max(initial=0.0)
    return float("inf") if np.isnan(gap) else float(gap / max(np.abs(a).max(initial=0.0), SMALLEST))
