"""Checks, what they measure, and what became of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number that may not exceed another one; one that is not finite always does."""

    what: str
    value: float
    bound: float
    detail: str = ""
    """Where it was found, or what it looks like."""
    rank: int = 0

    @property
    def ok(self) -> bool:
        """Whether the bound holds."""
        return self.value <= self.bound

    @property
    def excess(self) -> float:
        """How far from its bound, to tell which of several is the worst."""
        if not self.ok:
            return math.inf if not math.isfinite(self.value) else 1 + self.value / max(self.bound, 1e-300)
        return self.value / self.bound if self.bound else 0.0


def none_of(what: str, found: Sequence[str]) -> Measure:
    """A measure of things of which there may be none; the first ones are named."""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return Measure(what=what, value=float(len(found)), bound=0.0, detail=", ".join(found[:3]) + more)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One promise of the interfaces."""

    id: str
    claim: str
    """A sentence: what holds."""
    means: str
    """What it means for a job where it does not."""
    look: str
    """Which members of the interfaces to look at."""


@dataclass(kw_only=True, slots=True)
class Finding:
    """What became of one check."""

    check: Check
    measures: list[Measure] = field(default_factory=list)
    """The worst of all ranks for each thing that is measured."""
    error: str = ""
    """What ended the job within it; empty: nothing did."""
    reason: str = ""
    """Why it was not run."""

    @property
    def verdict(self) -> Verdict:
        """Whether the promise is kept."""
        if self.reason:
            return "not run"
        return "passed" if self.measures and not self.error and all(m.ok for m in self.measures) else "failed"

    @property
    def worst(self) -> Measure | None:
        """The measure that is nearest to its bound, or farthest beyond it."""
        return max(self.measures, key=lambda measure: measure.excess, default=None)

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is not finite as text."""
        return {
            **asdict(self.check),
            "verdict": self.verdict,
            "error": self.error,
            "reason": self.reason,
            "measures": [{**_plain(asdict(measure)), "ok": measure.ok} for measure in self.measures],
        }


def worst_of_ranks(measures: Iterable[Measure]) -> list[Measure]:
    """Of the measures of all ranks the worst of each kind, in the order in which kinds first appear."""
    found: dict[str, Measure] = {}
    for measure in measures:
        known = found.get(measure.what)
        if known is None or measure.excess > known.excess:
            found[measure.what] = measure
    return list(found.values())


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
