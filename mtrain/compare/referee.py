"""Find the inexact backend: by the first update in float64, and by the effect of nudging weights by one unit in the
last place."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtrain.compare.profiles import MEASURED, Profile
from mtrain.compare.traces import WORDS
from mtrain_trace import differences
from mtrain_trace.differences import GRADIENT, LOSS, MOMENTS, Gap
from mtrain_trace.reading import Trace
from mtrain_trace.rounding import widen

EXACT = 3e-5
"""Largest relative distance of loss and gradient norm of the first update in float32 from float64."""
LEAST = 1e-5
"""Differences up to this are allowed, however small the effect of the nudge is."""
SAME = 3e-6
"""Two backends whose loss and norm in float64 are closer than this compute the same function."""
QUANTITIES = (LOSS, GRADIENT, MOMENTS)


@dataclass(frozen=True, kw_only=True)
class Referee:
    """Measurements that settle a dispute between backends."""

    exact: Mapping[str, Trace] = field(repr=False)
    """First update in float64 of each backend. The reference's one is the standard; the others show whether they
    compute the same."""
    label: str
    """Label of the reference."""
    nudge: Mapping[str, Gap] | None = field(default=None, repr=False)
    """The reference compared with itself, started with every weight one unit in the last place away; None: it was not
    run."""

    def distances(self, trace: Trace) -> dict[str, float]:
        """Return the relative distance of a job's first update from float64 in loss, gradient norm and moments; inf if
        not finite."""
        return _distances(trace, self.exact[self.label])

    def decided_otherwise(self, trace: Trace) -> int:
        """Return for how many samples of a job's first update predictions were compared with other objects than in float64."""
        # Which they are is decided by the predictions themselves, and a rounding can move one across a threshold. The loss is
        # then another function, whose distance from float64 says nothing about kernels.
        own, exact = trace.updates[0].decided, self.exact[self.label].updates[0].decided
        return sum(one != other for one, other in zip(own, exact, strict=False))

    def otherwise(self, label: str) -> dict[str, float]:
        """Return the quantities in which a backend's own float64 differs from the reference's: rounding does not
        explain that."""
        if label not in self.exact:
            return {}
        distances = self.distances(self.exact[label])
        return {name: size for name, size in distances.items() if name != MOMENTS and not size <= SAME}

    def allowance(self, name: str) -> float:
        """Return the allowed distance of a job's first update from float64 in this quantity."""
        base_bound = EXACT if name != MOMENTS else LEAST
        # Moments add up squares, so no fixed bound suits them: without a nudged job they are not judged.
        if self.nudge is None:
            return base_bound if name != MOMENTS else math.inf
        return widen(base_bound, float(self.nudge[name].curve[0]))

    def inexact(self, distances: Mapping[str, float]) -> list[str]:
        """Return the quantities that are farther from float64 than allowed, as text."""
        return [
            f"{WORDS[name]} of update 1 {distances[name]:.1e} from float64, allowed {self.allowance(name):.0e}"
            for name in QUANTITIES
            if name in distances and not distances[name] <= self.allowance(name)
        ]


def _distances(trace: Trace, exact: Trace) -> dict[str, float]:
    gaps = differences.gaps(exact.first(1), trace.first(1))
    sizes = {name: float(gaps[name].curve[0]) for name in QUANTITIES}
    return {name: size for name, size in sizes.items() if not math.isnan(size)}


def with_measured_bounds(profile: Profile, referee: Referee) -> Profile:
    """Return ``profile`` with the bounds that float64 and the nudge give for this job; unchanged without a nudge."""
    if referee.nudge is None:
        return profile
    gaps = referee.nudge
    first = {name: widen(LEAST, float(gaps[name].curve[0])) for name in MEASURED if name in gaps}
    # Each of two jobs may be off by the distance allowed from float64.
    first |= {name: 2 * referee.allowance(name) for name in QUANTITIES if name in gaps}
    # Training can jump when rounding moves a box to another cell, and the nudged job may have missed such a jump.
    # So it widens the bounds on later updates and never narrows them.
    all_over = {name: widen(bound, gaps[name].largest) for name, bound in profile.throughout.items() if name in gaps}
    return replace(
        profile, at_start=_replace(first, profile.at_start), throughout=_replace(all_over, profile.throughout)
    )


def _replace(bounds: Mapping[str, float], profile_bounds: Mapping[str, float]) -> dict[str, float]:
    return {name: bounds.get(name, bound) for name, bound in profile_bounds.items()}


def ranking(referee: Referee, distances: Mapping[str, Mapping[str, float]]) -> Sequence[str]:
    """Return sentences that compare the first update with float64, the farthest backend first; ``distances`` by
    backend."""
    exact, sentences = referee.exact[referee.label], []
    values = {LOSS: f" ({exact.updates[0].loss:.7g})", GRADIENT: f" ({exact.updates[0].norm_before:.7g})"}
    for name in QUANTITIES:
        labels = [label for label in distances if name in distances[label]]
        order = sorted(labels, key=lambda label: -distances[label][name])
        sizes = ", ".join(f"{label} {distances[label][name]:.1e}" for label in order)
        if sizes:
            sentences.append(f"{WORDS[name]} off from float64{values.get(name, '')}: {sizes}")
    return sentences
