"""What one job has left: numbers and digests of every update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.trace import SIZE
from mtrain.errors import TrainingError
from mtrain.report.history import History, Record

WEIGHTS, MOMENTS, BUFFERS, EMA = "weights", "moments", "buffers", "ema"
STATE = (MOMENTS, WEIGHTS, BUFFERS, EMA)
"""Kinds of parts of a job's state, in the order in which an update changes what they depend on."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A job of ``U`` updates. State is given ``U + 1`` times: entry ``u`` is what update ``u`` starts from."""

    losses: Mapping[str, Array]
    """Name -> (U,), mean over the global batch."""
    norms: Array
    """(U,) of the gradient, before clipping."""
    rates: Array
    """(U, groups)."""
    momenta: Sequence[float | None]
    """None: as the groups say."""
    samples: Sequence[str]
    """U digests of what all ranks were given."""
    digests: Mapping[str, Sequence[str]]
    """Part (see ``core.trace.parts``) -> U + 1 digests."""
    sketches: Mapping[str, Array] = field(repr=False)
    """Part -> (U + 1, SIZE)."""
    drifted: int | None = None
    """Updates behind which the ranks did not hold the same weights, the first such number."""

    @property
    def updates(self) -> int:
        """U."""
        return len(self.norms)

    def named(self, kind: str) -> list[str]:
        """The parts of a kind, by name."""
        return sorted(name for name in self.digests if kind_of(name) == kind)

    def sketch(self, kind: str) -> Array:
        """(U + 1, SIZE) of all parts of a kind together."""
        total: Array = sum((self.sketches[name] for name in self.named(kind)), np.zeros((self.updates + 1, SIZE)))
        return total


def kind_of(part: str) -> str:
    """Which of ``STATE`` a part is."""
    head = part.partition("/")[0]
    return head if head in STATE else MOMENTS


def trace_of(history: History) -> Trace:
    """The trace of a finished job that was run with ``report.trace: state``.

    Raises:
        TrainingError: the job's records have none.
    """
    records = [history.updates[update] for update in sorted(history.updates)]
    if "trace" not in history.start or not records:
        raise TrainingError("the job left no trace: expected records of a job with report.trace: state")
    looks = [history.start["trace"], *(record["trace"] for record in records)]
    names = records[0]["losses"]
    parts = sorted(looks[0]["digests"])
    return Trace(
        losses={name: _numbers(record["losses"].get(name) for record in records) for name in names},
        norms=_numbers(record["norm"] for record in records),
        rates=np.array([record["rates"] for record in records], dtype=float),
        momenta=[record.get("momentum") for record in records],
        samples=[record["trace"]["samples"] for record in records],
        digests={part: [look["digests"].get(part, "") for look in looks] for part in parts},
        sketches={part: np.array([look["sketches"][part] for look in looks]) for part in parts},
        drifted=next((i for i, look in enumerate(looks) if not look["ranks_agree"]), None),
    )


def _numbers(values: Any) -> Array:
    """(U,); what was not finite is NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def seconds_of(records: Sequence[Record]) -> Array:
    """(U,) wall time of updates."""
    return np.array([record["seconds"] for record in records], dtype=float)
