"""Compare the last checkpoints of two jobs, array by array."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mtrain.core.interfaces import Array, State

SMALLEST = 1e-3
"""Smallest magnitude against which a difference is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Farthest:
    """The array in which two jobs differ most."""

    name: str
    difference: float
    """Largest |a - b| divided by the largest |a|."""


def farthest(a: State, b: State) -> dict[str, Farthest]:
    """Return the farthest array of weights (with buffers), averaged weights and moments; an array that one job lacks
    differs by inf."""
    pairs = {"weights": (a.weights, b.weights), "ema": (a.ema, b.ema), "moments": (a.moments, b.moments)}
    return {part: _farthest(one, other) for part, (one, other) in pairs.items() if one or other}


def _farthest(a: Mapping[str, Array], b: Mapping[str, Array]) -> Farthest:
    unmatched = sorted(a.keys() ^ b.keys())
    if unmatched:
        return Farthest(name=unmatched[0], difference=float("inf"))
    distances = {name: _relative(a[name], b[name]) for name in a}
    name = max(distances, key=lambda name: distances[name])
    return Farthest(name=name, difference=distances[name])


def _relative(a: Array, b: Array) -> float:
    if a.shape != b.shape:
        return float("inf")
    # Against the largest value of the array, and not below SMALLEST: a bias near zero does not count as a difference of 100%.
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    gap = np.abs(a - b).max(initial=0.0)
    return float("inf") if np.isnan(gap) else float(gap / max(np.abs(a).max(initial=0.0), SMALLEST))
