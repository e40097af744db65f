"""A whole comparison as data: what was asked, what each backend did, how far it is from the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtrain.comparing.arrays import Farthest
from mtrain.comparing.differences import WORDS, Difference, same_bits
from mtrain.comparing.profiles import Profile
from mtrain.comparing.referee import Referee
from mtrain.comparing.speed import Speed
from mtrain.comparing.traces import Trace

FORMAT = 1
"""Of ``compare.json``."""
Outcome = Literal["done", "failed", "refused", "absent"]
"""absent: what it needs is not installed; refused: the backend cannot do what the spec asks."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One backend."""

    label: str
    """As it was asked for: ``deepspeed:stage=3``."""
    outcome: Outcome
    reason: str = ""
    """Why it is not done."""
    ranks: int = 0
    notes: Sequence[str] = ()
    """What had to be set otherwise than for the reference."""
    trace: Trace | None = field(default=None, repr=False)
    speed: Speed | None = None
    repeats: bool | None = None
    """Whether the timed jobs ended with the bits of the traced one; None: there was none."""
    plan: str = ""
    """The traced job's plan as text."""

    @property
    def drifted(self) -> bool:
        """Whether its ranks did not hold the same weights, behind some update."""
        return self.trace is not None and self.trace.drifted is not None


@dataclass(frozen=True, kw_only=True)
class Against:
    """One backend against the reference."""

    difference: Difference
    farthest: Mapping[str, Farthest]
    """In the last checkpoints, by ``weights``, ``ema``, ``moments``."""
    beyond: Sequence[str]
    """What the profile does not allow."""
    causes: Sequence[str]

    @property
    def bits(self) -> bool:
        """Whether nothing at all differs."""
        return self.difference.first is None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One spec on several backends."""

    title: str
    source: str
    """Of the spec."""
    facts: Mapping[str, str]
    """What every job has in common, in words."""
    profile: Profile
    updates: int
    rows: Sequence[Row]
    against: Mapping[str, Against]
    """By label, for each that is done but the reference."""
    referee: Referee | None = None
    """None: all have the same bits, or float64 could not be had."""

    @property
    def reference(self) -> Row | None:
        """The first backend that is done."""
        return next((row for row in self.rows if row.outcome == "done"), None)

    @property
    def agree(self) -> bool:
        """Whether all backends ran, repeat themselves, keep their ranks alike, and are within the profile."""
        ran = all(row.outcome == "done" and row.repeats is not False and not row.drifted for row in self.rows)
        return ran and not any(against.beyond for against in self.against.values()) and not self.off

    @property
    def distances(self) -> Mapping[str, Mapping[str, float]]:
        """Backend -> how far its first update is from float64, see ``Referee.distances``; empty without a referee."""
        if self.referee is None:
            return {}
        return {row.label: self.referee.distances(row.trace) for row in self.rows if row.trace is not None}

    @property
    def off(self) -> Mapping[str, Sequence[str]]:
        """Backend -> what of its first update is too far from float64, in words, where the profile asks for float64."""
        if self.referee is None or not self.profile.measured:
            return {}
        found = {label: self.referee.inexact(distances) for label, distances in self.distances.items()}
        return {label: words for label, words in found.items() if words}

    def alike(self) -> list[list[str]]:
        """Labels of the backends that are done, those with the same bits together; the reference's first."""
        found: list[list[Row]] = []
        for row in self.rows:
            if row.trace is None:
                continue
            home = next((rows for rows in found if rows[0].trace and same_bits(rows[0].trace, row.trace)), None)
            if home is None:
                found.append([row])
            else:
                home.append(row)
        return [[row.label for row in rows] for rows in found]

    def verdict(self, row: Row) -> str:
        """One word or two for the table."""
        if row.outcome != "done":
            return {"failed": "failed", "refused": "refused", "absent": "not installed"}[row.outcome]
        if row.drifted:
            return "ranks differ"
        if row is self.reference:
            return "reference, inexact" if row.label in self.off else "reference"
        against = self.against[row.label]
        if against.bits and row.label not in self.off:
            return "same bits"
        if row.label in self.off:
            return "inexact"
        return "differs" if against.beyond else f"within {self.profile.name}"

    def as_json(self) -> dict[str, Any]:
        """Plain values for ``compare.json``; curves are in it, sketches are not."""
        reference = self.reference
        return {
            "format": FORMAT,
            "agree": self.agree,
            "title": self.title,
            "source": self.source,
            "facts": dict(self.facts),
            "updates": self.updates,
            "reference": None if reference is None else reference.label,
            "profile": {
                "name": self.profile.name,
                "meaning": self.profile.meaning,
                "at_start": dict(self.profile.at_start),
                "throughout": dict(self.profile.throughout),
            },
            "float64": None if self.referee is None else _float64(self.referee),
            "same_bits": self.alike(),
            "backends": [self._row(row) for row in self.rows],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        told: dict[str, Any] = {"label": row.label, "verdict": self.verdict(row), "outcome": row.outcome}
        if row.label in self.distances:
            told["from_float64"] = dict(self.distances[row.label])
        told |= {"reason": row.reason, "ranks": row.ranks, "notes": list(row.notes), "repeats": row.repeats}
        if row.speed is not None:
            told["speed"] = {name: getattr(row.speed, name) for name in Speed.__dataclass_fields__}
        if row.trace is not None:
            told["losses"] = dict(row.trace.losses)
            told["norms"] = row.trace.norms
            told["samples"] = list(row.trace.samples)
            told["digests"] = {part: list(values) for part, values in row.trace.digests.items()}
        if row.label in self.against:
            told["against_reference"] = _against(self.against[row.label])
        return told


def _float64(referee: Referee) -> dict[str, Any]:
    nudge = referee.nudge
    return {
        "first_update": {
            label: {"loss": float(trace.losses["total"][0]), "norm": float(trace.norms[0])}
            for label, trace in referee.exact.items()
        },
        "nudged": None if nudge is None else {name: gap.curve for name, gap in nudge.gaps.items()},
    }


def _against(against: Against) -> dict[str, Any]:
    found = against.difference
    return {
        "same_bits": against.bits,
        "first_update": found.first,
        "first_in": [WORDS[name] for name in found.what],
        "beyond_profile": list(against.beyond),
        "causes": list(against.causes),
        "gaps": {
            name: {"first_update": gap.first, "largest": gap.largest, "curve": gap.curve}
            for name, gap in found.gaps.items()
        },
        "last_checkpoint": {
            part: {"largest": far.difference, "array": far.name} for part, far in against.farthest.items()
        },
    }
