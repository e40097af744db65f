"""The table of a sweep: one row for each trial, without anything that differs when the sweep is repeated."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from mtrain.studies.sweep.journal import REASON, UPDATE
from mtrain.studies.sweep.request import Request

STATES: Mapping[TrialState, str] = {
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
    TrialState.WAITING: "unfinished",
}


def columns(request: Request) -> list[str]:
    """Return the names of the columns."""
    return ["trial", "state", request.metric, "update", *(parameter.name for parameter in request.parameters), "reason"]


def rows(request: Request, trials: Sequence[FrozenTrial]) -> list[list[Any]]:
    """Return the rows, by number of the trial; None for a value that a trial does not have."""
    return [
        [
            trial.number,
            STATES[trial.state],
            trial.value,
            trial.user_attrs.get(UPDATE),
            *(trial.params.get(parameter.name) for parameter in request.parameters),
            trial.user_attrs.get(REASON),
        ]
        for trial in trials
    ]


def best_trial(request: Request, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the best trial that has reached its end, the first of equal ones; None if there is none."""
    chosen: FrozenTrial | None = None
    for trial in trials:
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            chosen = trial if request.better(trial.value, chosen.value if chosen else None) else chosen
    return chosen


def as_csv(request: Request, trials: Sequence[FrozenTrial]) -> str:
    """Return the table as CSV, numbers with all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns(request))
    for row in rows(request, trials):
        writer.writerow(["" if cell is None else repr(cell) if isinstance(cell, float) else cell for cell in row])
    return text.getvalue()


def shown(cell: Any) -> str:
    """Return one cell for people."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4g}" if math.isfinite(cell) else str(cell)
    return str(cell)


def shown_params(params: Mapping[str, Any]) -> str:
    """Return the values of a trial in one line."""
    return "  ".join(f"{name} {shown(value)}" for name, value in params.items())
