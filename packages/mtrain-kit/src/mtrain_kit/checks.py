"""Checks, their measures, and their results."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtrain.errors import UsageError, first_few
from mtrain.spec.suggest import hint

Verdict = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A number that may not exceed its bound; a number that is not finite always does."""

    what: str
    value: float
    bound: float
    detail: str = ""
    """Where the value was measured, or further information."""
    rank: int = 0

    @property
    def ok(self) -> bool:
        """Return whether the bound holds."""
        return self.value <= self.bound

    @property
    def excess(self) -> float:
        """Return the distance from the bound as a number by which measures can be ranked."""
        if not self.ok:
            return math.inf if not math.isfinite(self.value) else 1 + self.value / max(self.bound, 1e-300)
        return self.value / self.bound if self.bound else 0.0


def none_of(what: str, things: Sequence[str]) -> Measure:
    """Create a measure of things that must not exist; the first three are named."""
    return Measure(what=what, value=float(len(things)), bound=0.0, detail=first_few(things, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One promise of the interfaces."""

    id: str
    claim: str
    """A sentence that states the promise."""
    means: str
    """Consequence for a job if the promise is broken."""
    look: str
    """Members of the interfaces to look at."""


@dataclass(kw_only=True, slots=True)
class Finding:
    """The result of one check."""

    check: Check
    measures: list[Measure] = field(default_factory=list)
    """The worst measure of all ranks for each quantity."""
    error: str = ""
    """Error that ended the job within the check; empty: none."""
    reason: str = ""
    """Reason why the check was not run; empty if it was."""

    @property
    def verdict(self) -> Verdict:
        """Return whether the promise is kept."""
        if self.reason:
            return "not run"
        return "passed" if self.measures and not self.error and all(m.ok for m in self.measures) else "failed"

    @property
    def worst(self) -> Measure | None:
        """Return the measure that is nearest to its bound, or farthest beyond it."""
        return max(self.measures, key=lambda measure: measure.excess, default=None)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; numbers that are not finite become text."""
        return {
            **asdict(self.check),
            "verdict": self.verdict,
            "error": self.error,
            "reason": self.reason,
            "measures": [{**_plain(asdict(measure)), "ok": measure.ok} for measure in self.measures],
        }


@dataclass(kw_only=True)
class Results(ABC):
    """The results of all checks of one plugin."""

    provider: str
    folder: Path
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    @property
    @abstractmethod
    def has_passed(self) -> bool:
        """Return whether the plugin keeps what it promises, as far as that was to be checked."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            **{key: value for key, value in asdict(self).items() if key not in ("findings", "folder")},
            "folder": str(self.folder),
            "seconds": round(self.seconds, 1),
            "passed": self.has_passed,
            "checks": [finding.as_json() for finding in self.findings],
        }


def choose_checks(only: Sequence[str], among: Sequence[Check]) -> list[Check]:
    """Return the checks whose id is, or begins with, one of ``only``; all if it is empty.

    Raises:
        UsageError: an entry matches no check.
    """
    ids = [check.id for check in among]
    for word in only:
        if not any(check_id.startswith(word) for check_id in ids):
            raise UsageError(f"--only {word}: no such check{hint(word, ids)}")
    return [check for check in among if not only or any(check.id.startswith(word) for word in only)]


def worst_of_ranks(measures: Iterable[Measure]) -> list[Measure]:
    """Return the worst measure of each kind over all ranks, in the order in which kinds first appear."""
    worst_by_kind: dict[str, Measure] = {}
    for measure in measures:
        worst = worst_by_kind.get(measure.what)
        if worst is None or measure.excess > worst.excess:
            worst_by_kind[measure.what] = measure
    return list(worst_by_kind.values())


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
