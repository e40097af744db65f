"""Who is off: the first update in float64, and what training makes of a difference of one unit in the last place."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mtrain.comparing.differences import LOSS, MEASURED, NORM, WORDS, Difference
from mtrain.comparing.profiles import Profile
from mtrain.comparing.traces import MOMENTS, Trace

EXACT = 3e-5
"""How far loss and gradient norm of the first update in float32 may be from float64, relatively."""
GROWTH = 10.0
"""How many times as far as the nudged job two jobs may be apart: a nudge rounds the weights once, a job each of its layers."""
LEAST = 1e-5
"""Differences up to this are allowed however little the nudge did."""
SAME = 3e-6
"""Two backends whose loss and norm in float64 are closer than this mean the same."""
QUANTITIES = (LOSS, NORM, MOMENTS)


@dataclass(frozen=True, kw_only=True)
class Referee:
    """What settles a dispute between backends."""

    exact: Mapping[str, Trace] = field(repr=False)
    """Backend -> its first update in float64. The reference's counts; others tell whether they mean the same."""
    label: str
    """Of the reference."""
    nudge: Difference | None = field(default=None, repr=False)
    """The reference against itself, started with every weight one unit in the last place away; None: it was not run."""

    def distances(self, trace: Trace) -> dict[str, float]:
        """How far the first update of a job is from float64, relatively: loss, gradient norm, moments; inf where not finite."""
        return _distances(trace, self.exact[self.label])

    def otherwise(self, label: str) -> dict[str, float]:
        """Where a backend's own float64 is not that of the reference: no rounding explains it."""
        if label not in self.exact:
            return {}
        apart = self.distances(self.exact[label])
        return {name: size for name, size in apart.items() if name != MOMENTS and not size <= SAME}

    def allowed(self, name: str) -> float:
        """How far the first update of a job may be from float64 in this quantity."""
        promised = EXACT if name != MOMENTS else LEAST
        if self.nudge is None:
            return promised if name != MOMENTS else math.inf
        return max(promised, GROWTH * float(self.nudge.gaps[name].curve[0]))

    def inexact(self, distances: Mapping[str, float]) -> list[str]:
        """What is farther from float64 than allowed, in words."""
        return [
            f"{WORDS[name]} of the first update {distances[name]:.1e} from float64, allowed {self.allowed(name):.0e}"
            for name in QUANTITIES
            if name in distances and not distances[name] <= self.allowed(name)
        ]


def _distances(trace: Trace, exact: Trace) -> dict[str, float]:
    found = {
        LOSS: _relative(trace.losses["total"][0] - exact.losses["total"][0], exact.losses["total"][0]),
        NORM: _relative(trace.norms[0] - exact.norms[0], exact.norms[0]),
    }
    if exact.named(MOMENTS):
        ours, theirs = trace.sketch(MOMENTS)[1], exact.sketch(MOMENTS)[1]
        found[MOMENTS] = _relative(float(np.linalg.norm(ours - theirs)), float(np.linalg.norm(theirs)))
    return found


def _relative(gap: float, exact: float) -> float:
    distance = abs(float(gap)) / max(abs(float(exact)), 1e-300)
    return distance if math.isfinite(distance) else math.inf


def measured(profile: Profile, referee: Referee) -> Profile:
    """``profile`` with bounds that this very job gives: from float64 and from the nudge. Without a nudge as it was."""
    if referee.nudge is None:
        return profile
    gaps = referee.nudge.gaps
    first = {name: max(LEAST, GROWTH * float(gaps[name].curve[0])) for name in MEASURED if name in gaps}
    # Each of two jobs may be off by what float64 allows.
    first |= {name: 2 * referee.allowed(name) for name in QUANTITIES if name in gaps}
    # Training can jump where a rounding moves a box to another cell, in one update or in a later one: the nudge may not have met its jump.
    # So it widens the bounds on later updates and never narrows them.
    all_over = {
        name: max(bound, GROWTH * gaps[name].largest) for name, bound in profile.throughout.items() if name in gaps
    }
    return replace(profile, at_start=_kept(first, profile.at_start), throughout=_kept(all_over, profile.throughout))


def _kept(bounds: Mapping[str, float], asked: Mapping[str, float]) -> dict[str, float]:
    return {name: bounds.get(name, bound) for name, bound in asked.items()}


def ranking(referee: Referee, distances: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    """Sentences of the first update against float64, the farthest backend first; ``distances`` by backend."""
    exact, said = referee.exact[referee.label], []
    values = {LOSS: f" ({exact.losses['total'][0]:.7g})", NORM: f" ({exact.norms[0]:.7g})"}
    for name in QUANTITIES:
        known = [label for label in distances if name in distances[label]]
        order = sorted(known, key=lambda label: -distances[label][name])
        sizes = ", ".join(f"{label} {distances[label][name]:.1e}" for label in order)
        if sizes:
            said.append(f"{WORDS[name]} off from float64{values.get(name, '')}: {sizes}")
    return said
