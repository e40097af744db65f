"""The table of a sweep: one row for each trial, without anything that differs when the sweep is repeated."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.journal import REASON, UPDATE

STATES: Mapping[TrialState, str] = {
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "unfinished",
    TrialState.WAITING: "unfinished",
}


def columns(definition: SweepDefinition) -> list[str]:
    """Return the names of the columns."""
    return [
        "trial",
        "state",
        definition.metric,
        "update",
        *(parameter.name for parameter in definition.parameters),
        "reason",
    ]


def rows(definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> list[list[Any]]:
    """Return the rows, by number of the trial; None for a value that a trial does not have."""
    return [
        [
            trial.number,
            STATES[trial.state],
            trial.value,
            trial.user_attrs.get(UPDATE),
            *(trial.params.get(parameter.name) for parameter in definition.parameters),
            trial.user_attrs.get(REASON),
        ]
        for trial in trials
    ]


def best_trial(definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the best trial that has reached its end, the first of equal ones; None if there is none."""
    chosen: FrozenTrial | None = None
    for trial in trials:
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            chosen = trial if definition.better(trial.value, chosen.value if chosen else None) else chosen
    return chosen


def as_csv(definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> str:
    """Return the table as CSV, numbers with all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns(definition))
    for row in rows(definition, trials):
        # repr keeps all digits, so that a repeated sweep has the same file byte for byte.
        writer.writerow(["" if cell is None else repr(cell) if isinstance(cell, float) else cell for cell in row])
    return text.getvalue()


def show_cell(cell: Any) -> str:
    """Return one cell for people."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.4g}" if math.isfinite(cell) else str(cell)
    return str(cell)


def shown_params(params: Mapping[str, Any]) -> str:
    """Return the values of a trial in one line."""
    return "  ".join(f"{name} {show_cell(value)}" for name, value in params.items())
