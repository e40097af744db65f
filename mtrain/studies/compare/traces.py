"""Read the trace of one job: numbers and digests of every update."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.trace import SIZE
from mtrain.errors import TrainingError
from mtrain.records.history import History, Record

WEIGHTS, MOMENTS, BUFFERS, EMA = "weights", "moments", "buffers", "ema"
SCRIPT_LOSS = "loss"
"""Name under which a script's job reports the loss that it trains."""
STATE = (MOMENTS, WEIGHTS, BUFFERS, EMA)
"""Kinds of parts of a job's state, in the order in which an update computes them."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The trace of a job of ``U`` updates. State has ``U + 1`` entries: entry ``u`` is the state before update
    ``u``."""

    losses: Mapping[str, Array]
    """Mean over the global batch of each loss, (U,) by name."""
    norms: Array
    """(U,) norm of the gradient before clipping."""
    rates: Array
    """(U, groups) learning rates."""
    momenta: Sequence[float | None]
    """Momentum of each update; None: that of the groups."""
    samples: Sequence[str]
    """U digests of the samples of all ranks."""
    digests: Mapping[str, Sequence[str]]
    """U + 1 digests of each part (see ``core.trace.parts``)."""
    sketches: Mapping[str, Array] = field(repr=False)
    """(U + 1, SIZE) sketches of each part."""
    drifted: int | None = None
    """Number of updates after which the ranks first held different weights; None: never."""
    models: Sequence[str] = ()
    """Of several models, that of each parameter group."""
    norms_of: Mapping[str, Array] = field(default_factory=dict)
    """Of several models, the (U,) norm of each one's gradient; NaN where an update has left it out."""
    trained: Sequence[frozenset[str]] = ()
    """Of several models, those that each of the U updates has trained."""

    @property
    def updates(self) -> int:
        """Return the number of updates, U."""
        return len(self.norms)

    def first(self, updates: int) -> "Trace":
        """Return the trace of the first ``updates`` updates."""
        if updates == self.updates:
            return self
        return replace(
            self,
            losses={name: values[:updates] for name, values in self.losses.items()},
            norms=self.norms[:updates],
            rates=self.rates[:updates],
            momenta=self.momenta[:updates],
            samples=self.samples[:updates],
            digests={part: values[: updates + 1] for part, values in self.digests.items()},
            sketches={part: values[: updates + 1] for part, values in self.sketches.items()},
            drifted=self.drifted if self.drifted is not None and self.drifted <= updates else None,
            norms_of={name: values[:updates] for name, values in self.norms_of.items()},
            trained=self.trained[:updates],
        )

    def named(self, kind: str) -> list[str]:
        """Return the names of all parts of a kind, sorted."""
        return sorted(name for name in self.digests if kind_of(name) == kind)

    def model_of(self, part: str) -> str:
        """Return the model to which a part belongs; empty for an only one."""
        place = part.rpartition("/")[2]
        if kind_of(part) in (BUFFERS, EMA):
            return place if "/" in part else ""
        return self.models[int(place)] if self.models else ""

    def sketch(self, kind: str) -> Array:
        """Return the (U + 1, SIZE) sketch of all parts of a kind together."""
        total: Array = sum((self.sketches[name] for name in self.named(kind)), np.zeros((self.updates + 1, SIZE)))
        return total


def kind_of(part: str) -> str:
    """Return which of ``STATE`` a part is."""
    head = part.partition("/")[0]
    return head if head in STATE else MOMENTS


def trace_of(history: History, *, loss: str | None = None) -> Trace:
    """Return the trace of a finished job that was run with ``report.trace: state``.

    ``loss``: name of the trained loss among the values that a script reports, which are otherwise left out because they
    may be anything, such as times. None: all values are losses, and ``total`` is trained.

    Raises:
        TrainingError: the job's records contain no trace.
    """
    records = [history.updates[update] for update in sorted(history.updates)]
    if "trace" not in history.start or not records:
        raise TrainingError("the job left no trace: expected records of a job with report.trace: state")
    entries = [history.start["trace"], *(record["trace"] for record in records)]
    parts = sorted(entries[0]["digests"])
    return Trace(
        losses=_losses(records, loss),
        norms=_numbers(_norm(record) for record in records),
        rates=np.array([record["learning_rates"] for record in records], dtype=float),
        momenta=[record.get("momentum") for record in records],
        samples=[record["trace"]["samples"] for record in records],
        digests={part: [entry["digests"].get(part, "") for entry in entries] for part in parts},
        sketches={part: np.array([entry["sketches"][part] for entry in entries]) for part in parts},
        drifted=next((i for i, entry in enumerate(entries) if not entry["ranks_agree"]), None),
        models=entries[0].get("models", ()),
        norms_of={
            model: _numbers(record["models"][model]["gradient_norm"] for record in records)
            for model in records[0].get("models", ())
        },
        trained=[
            frozenset(model for model, facts in record["models"].items() if facts["updated"])
            for record in records
            if "models" in record
        ],
    )


def _losses(records: Sequence[Mapping[str, Any]], loss: str | None) -> dict[str, Array]:
    """Return the losses by name; of several models that of each, and their sum as ``total``."""
    if loss is None:
        return {name: _numbers(record["losses"].get(name) for record in records) for name in records[0]["losses"]}
    if "models" not in records[0]:
        return {"total": _numbers(record["losses"].get(loss) for record in records)}
    # A model that an update leaves out has no loss in its record.
    each = {
        name: np.array([record["losses"].get(name, 0.0) for record in records], dtype=float)
        for name in (f"{loss}_{model}" for model in records[0]["models"])
    }
    return {"total": np.sum(list(each.values()), axis=0), **each}


def _norm(record: Mapping[str, Any]) -> float | None:
    """Return the norm of an update's gradient, over all models that it has trained."""
    norms = [facts["gradient_norm"] for facts in record.get("models", {}).values() if facts["updated"]]
    if len(norms) < 2:
        return record["gradient_norm"]  # type: ignore[no-any-return]
    return None if None in norms else math.hypot(*norms)


def _numbers(values: Any) -> Array:
    """Convert values to (U,); a value that was not finite becomes NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def seconds_of(records: Sequence[Record]) -> Array:
    """Return the (U,) wall times of updates, in seconds."""
    return np.array([record["update_seconds"] for record in records], dtype=float)
