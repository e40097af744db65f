"""A whole comparison as data: its settings, the result of each backend, and the distance of each from the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtrain.compare.profiles import MEASURED, Profile
from mtrain.compare.referee import Referee
from mtrain.compare.speed import Speed
from mtrain.compare.traces import WORDS, columns
from mtrain_trace import comparing, differences
from mtrain_trace.differences import Gap
from mtrain_trace.reading import Trace

FORMAT = 1
"""Version of the format of ``compare.json``."""
Outcome = Literal["done", "failed", "refused", "absent"]
"""Outcome of a backend. absent: a requirement is not installed; refused: the backend does not support the spec."""


@dataclass(frozen=True, kw_only=True)
class BackendRow:
    """The result of one backend."""

    label: str
    """Entry of ``--backends``: ``deepspeed:stage=3``."""
    outcome: Outcome
    reason: str = ""
    """Reason why the job is not done; empty if it is."""
    ranks: int = 0
    notes: Sequence[str] = ()
    """Settings that had to differ from the reference's."""
    trace: Trace | None = field(default=None, repr=False)
    speed: Speed | None = None
    repeats: bool | None = None
    """Whether the timed jobs ended with the bits of the traced one; None: there was no timed job."""
    plan: str = ""
    """Plan of the traced job as text."""

    @property
    def has_drifted(self) -> bool:
        """Return whether the ranks held different weights after some update."""
        return self.trace is not None and self.trace.first_drift is not None


@dataclass(frozen=True, kw_only=True)
class Against:
    """The comparison of one backend with the reference."""

    difference: comparing.Comparison
    beyond: Sequence[str]
    """Differences that the profile does not allow, as text."""
    causes: Sequence[str]
    updates: tuple[int, int] = (0, 0)
    """Number of updates of the reference and of this backend; scripts may end at different ones. The updates that both
    made are compared."""

    @property
    def bits(self) -> bool:
        """Return whether all bits of all updates are the same."""
        return self.difference.first is None and self.updates[0] == self.updates[1]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of one spec on several backends."""

    title: str
    source: str
    """Source of the spec."""
    facts: Mapping[str, str]
    """Settings that all jobs have in common, as text."""
    profile: Profile
    updates: int
    rows: Sequence[BackendRow]
    against: Mapping[str, Against]
    """Comparison with the reference by label, for each other backend that is done."""
    referee: Referee | None = None
    """Float64 measurements. None: all have the same bits, or float64 is not available."""
    load: float = 0.0
    """Processes that waited or ran on each core of this machine before the first job."""

    @property
    def reference(self) -> BackendRow | None:
        """Return the first backend that is done."""
        return next((row for row in self.rows if row.outcome == "done"), None)

    @property
    def agree(self) -> bool:
        """Return whether all backends ran, repeat themselves, keep their ranks equal, and are within the profile."""
        return all(row.outcome == "done" for row in self.rows) and not self.differ

    @property
    def differ(self) -> bool:
        """Return whether backends that ran differ; where one did not run, they neither agree nor differ."""
        # A backend that does not repeat itself, or whose ranks differ, differs from itself already.
        own = any(row.repeats is False or row.has_drifted for row in self.rows)
        return own or bool(self.off) or any(against.beyond for against in self.against.values())

    @property
    def distances(self) -> Mapping[str, Mapping[str, float]]:
        """Return each backend's distances of its first update from float64, see ``Referee.distances``; empty without a
        referee."""
        if self.referee is None:
            return {}
        return {row.label: self.referee.distances(row.trace) for row in self.rows if row.trace is not None}

    @property
    def decided_otherwise(self) -> Mapping[str, int]:
        """Return for each backend of which there are some the number of samples, see ``Referee.decided_otherwise``."""
        if self.referee is None:
            return {}
        counts = {row.label: self.referee.decided_otherwise(row.trace) for row in self.rows if row.trace is not None}
        return {label: count for label, count in counts.items() if count}

    @property
    def off(self) -> Mapping[str, Sequence[str]]:
        """Return for each inexact backend the quantities too far from float64, as text, if the profile asks for
        float64."""
        if self.referee is None or not self.profile.measured:
            return {}
        # Where a rounding has decided which objects are compared, the distance says nothing about the backend.
        comparable = {label: x for label, x in self.distances.items() if label not in self.decided_otherwise}
        inexact = {label: self.referee.inexact(distances) for label, distances in comparable.items()}
        return {label: words for label, words in inexact.items() if words}

    def alike(self) -> list[list[str]]:
        """Group the labels of the finished backends by equal bits; the reference's group comes first."""
        groups: list[list[BackendRow]] = []
        for row in self.rows:
            if row.trace is None:
                continue
            group = next((rows for rows in groups if rows[0].trace and _same_bits(rows[0].trace, row.trace)), None)
            if group is None:
                groups.append([row])
            else:
                group.append(row)
        return [[row.label for row in rows] for rows in groups]

    def verdict(self, row: BackendRow) -> str:
        """Return a verdict of one or two words for the table."""
        if row.outcome != "done":
            return {"failed": "failed", "refused": "refused", "absent": "not installed"}[row.outcome]
        if row.has_drifted:
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
        """Return plain values for ``compare.json``, with curves and without sketches."""
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

    def _row(self, row: BackendRow) -> dict[str, Any]:
        fields: dict[str, Any] = {"label": row.label, "verdict": self.verdict(row), "outcome": row.outcome}
        if row.label in self.distances:
            fields["from_float64"] = dict(self.distances[row.label])
            fields["decided_otherwise"] = self.decided_otherwise.get(row.label, 0)
        fields |= {"reason": row.reason, "ranks": row.ranks, "notes": list(row.notes), "repeats": row.repeats}
        if row.speed is not None:
            fields["speed"] = {name: getattr(row.speed, name) for name in Speed.__dataclass_fields__}
        if row.trace is not None:
            # Digests and not arrays: the file stays small, and equal states are seen all the same.
            fields |= columns(row.trace)
        if row.label in self.against:
            fields["against_reference"] = _against(self.against[row.label])
        return fields


def _same_bits(a: Trace, b: Trace) -> bool:
    """Return whether two traces are identical."""
    return len(a.updates) == len(b.updates) and all(gap.first is None for gap in differences.gaps(a, b).values())


def _curves(gaps: Mapping[str, Gap]) -> dict[str, Any]:
    return {name: gap.curve for name, gap in gaps.items() if name in MEASURED}


def _float64(referee: Referee) -> dict[str, Any]:
    nudge = referee.nudge
    return {
        "first_update": {
            label: {"loss": trace.updates[0].loss, "norm": trace.updates[0].norm_before}
            for label, trace in referee.exact.items()
        },
        "nudged": None if nudge is None else _curves(nudge),
    }


def _against(against: Against) -> dict[str, Any]:
    comparison = against.difference
    return {
        "same_bits": against.bits,
        "first_update": comparison.first,
        "first_in": [WORDS[name] for name in comparison.what],
        "beyond_profile": list(against.beyond),
        "causes": list(against.causes),
        "gaps": {
            name: {"first_update": gap.first, "largest": gap.largest, "curve": gap.curve}
            for name, gap in comparison.gaps.items()
        },
    }
