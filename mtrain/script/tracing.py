"""Trace every update of a script's job for ``mtrain compare``, and change its training as a trial asks."""

from collections.abc import Mapping
from typing import Any

from mtrain.core.interfaces import HostBatch, Optimizer, RankSession, State
from mtrain.core.nudge import nudged
from mtrain.core.trace import Shares, Tracer, traffic
from mtrain.script.settings import changed
from mtrain.spec.trial import Trial


class Tracing:
    """The trace of a script's job, as ``report.trace`` asks for it. Every rank must call its methods, except ``saw``."""

    def __init__(self, spec: Any, rank: RankSession, model: Any, optimizer: Optimizer) -> None:
        self._wanted = spec.report.trace
        self._rank = rank
        self._shares = Shares()
        self._tracer: Tracer | None = None
        if self._wanted == "state":
            self._tracer = Tracer(
                rank.collective,
                optimizer.groups,
                lambda: rank.state(model, optimizer),
                accumulate=spec.train.accumulate,
            )

    def saw(self, batch: HostBatch) -> None:
        """Take note of this rank's next micro batch."""
        if self._tracer is not None:
            self._tracer.saw(batch)

    def start(self) -> dict[str, Any]:
        """Return the fields for the first record."""
        return {} if self._tracer is None else {"trace": self._tracer.look()}

    def updated(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields for the record of an update."""
        self._shares.take(record)
        if self._wanted == "none":
            return {}
        return {**traffic(), **({} if self._tracer is None else {"trace": self._tracer.after_update()})}

    def measured(self) -> list[dict[str, float]]:
        """Return what each rank has measured, by rank."""
        mine = {**self._rank.measure(), **self._shares.summary()}
        everyone: list[dict[str, float]] = self._rank.collective.all_gather(mine)
        return everyone


def on_trial(spec: Any, trial: Trial | None) -> Any:
    """Return ``spec`` with the precision and the micro batches that ``trial`` asks for."""
    if trial is None:
        return spec
    changes: dict[str, Any] = {"train.accumulate": spec.train.accumulate * trial.shares}
    if trial.exact:
        changes["train.precision"] = "fp64"
    return changed(spec, changes)


def shortened(total_updates: int, trial: Trial | None) -> int:
    """Return the number of updates that a job makes where the script asks for ``total_updates``."""
    return total_updates if trial is None else min(total_updates, trial.updates)


def nudge(rank: RankSession, model: Any, optimizer: Optimizer) -> None:
    """Move every trained weight by one unit in its last place; every rank must call."""
    weights = rank.state(model, optimizer).weights
    trained = {name for names in optimizer.groups for name in names}
    moved = nudged(weights, trained)
    # A tied weight has an entry for each of its names, of which the groups have one.
    twins = {weights[name].tobytes(): name for name in trained}
    tied = {name: moved[twins[x.tobytes()]] for name, x in weights.items() if x.size > 1 and x.tobytes() in twins}
    same_shape = {name: x for name, x in tied.items() if x.shape == weights[name].shape and name not in trained}
    rank.restore(model, optimizer, State(weights={**moved, **same_shape}))
