"""Define how much two jobs may differ and still agree."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtrain.compare.traces import WORDS, ordinal
from mtrain_trace.differences import BUFFERS, GRADIENT, LOSS, MOMENTS, SAMPLES, START, STATE, WEIGHTS, Gap
from mtrain_trace.reading import AVERAGE

MEASURED = (LOSS, GRADIENT, *STATE)
"""Quantities that a profile bounds."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Bounds on relative differences (see ``mtrain_trace.differences.MEANING``); samples and start weights must have the same
    bits."""

    name: str
    meaning: str
    at_start: Mapping[str, float]
    """Bounds for the first update, in which jobs differ by rounding only."""
    throughout: Mapping[str, float]
    """Bounds for every update; they are wider because training multiplies differences."""
    measured: bool = False
    """Whether float64 and a nudged job set the bounds where backends differ; the bounds here are used if these are not
    available."""


def _all(value: float) -> dict[str, float]:
    return dict.fromkeys(MEASURED, value)


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(name="bitwise", meaning="the same bits in every update", at_start=_all(0.0), throughout=_all(0.0)),
        Profile(
            name="float32",
            meaning="rounding of float32 in the first update, and its growth during training afterwards",
            measured=True,
            at_start={LOSS: 1e-5, GRADIENT: 1e-4, MOMENTS: 5e-4, WEIGHTS: 5e-4, BUFFERS: 5e-4},
            throughout={LOSS: 5e-2, WEIGHTS: 0.3, BUFFERS: 0.5, AVERAGE: 0.1},
        ),
        Profile(
            name="loose",
            meaning="the same training with the rounding of half precision or of other BatchNorm batches",
            at_start={LOSS: 2e-2, GRADIENT: 0.2, WEIGHTS: 0.3},
            throughout={LOSS: 0.2, WEIGHTS: 0.5, AVERAGE: 0.5},
        ),
    )
}


def violations(gaps: Mapping[str, Gap], profile: Profile) -> list[str]:
    """Return the violations of the profile as text; empty: the two jobs agree."""
    beyond = [f"{WORDS[name]} are not the same" for name in (START, SAMPLES) if gaps[name].first is not None]
    # `not a <= b` in place of `a > b`: a difference that is NaN is beyond every bound.
    for name in MEASURED:
        gap = gaps.get(name)
        if gap is None or gap.first is None:
            continue
        if not profile.throughout.get(name, 1.0) and not profile.at_start.get(name, 1.0):
            beyond.append(
                f"{WORDS[name]} of {ordinal(gap.first)} not the same bits (largest difference {gap.largest:.1e})"
            )
        elif name in profile.at_start and not gap.curve[0] <= profile.at_start[name]:
            beyond.append(f"{WORDS[name]} of update 1 {gap.curve[0]:.1e} apart, allowed {profile.at_start[name]:.0e}")
        elif name in profile.throughout and not gap.largest <= profile.throughout[name]:
            beyond.append(f"{WORDS[name]} up to {gap.largest:.1e} apart, allowed {profile.throughout[name]:.0e}")
    return beyond
