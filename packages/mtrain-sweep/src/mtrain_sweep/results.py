"""The result of a sweep as objects, for scripts and notebooks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtrain.spec import remedies
from mtrain.spec.calls import explain_calls

if TYPE_CHECKING:
    from pandas import DataFrame


State = Literal["done", "pruned", "failed", "unfinished"]
Reason = Literal["finished", "failed", "interrupted", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTrial:
    """One trial of a sweep."""

    number: int
    state: State
    value: float | None
    """The best value of the metric in its evaluations; of a pruned trial, in those before its end. None: it has none."""
    update: int | None
    """Updates after which the trial had this value."""
    params: Mapping[str, Any]
    """The searched values, by path in the spec."""
    run_dir: Path
    """Its run folder, for ``mtrain.open_run``."""
    reason: str = ""
    """Why it failed or was pruned."""
    seconds: float | None = None
    """Seconds that its job took since the sweep was last started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """The trials of a sweep."""

    folder: Path
    metric: str
    direction: Literal["max", "min"]
    trials: Sequence[SweepTrial]
    best: SweepTrial | None
    """The best trial that has reached its end."""
    reason: Reason = "unknown"
    """How the sweep ended; ``unknown`` where its folder was only opened."""

    @property
    def best_spec(self) -> Path | None:
        """Return the file with the spec of the best trial."""
        file = self.folder / "best.yml"
        return file if file.is_file() else None

    def pandas(self) -> "DataFrame":
        """Return one row for each trial, with the searched values as columns.

        Raises:
            UsageError: pandas is not installed.
        """
        remedies.require(["pandas"], what="pandas()", extra="data")
        from pandas import DataFrame

        fixed = ("number", "state", "value", "update", "reason")
        return DataFrame([{**{name: getattr(trial, name) for name in fixed}, **trial.params} for trial in self.trials])


def result_in(folder: Path | None, reason: Reason = "unknown") -> SweepResult:
    """Return the sweep in ``folder``, which may still run; None: the newest one."""
    from mtrain_sweep import starting
    from mtrain_sweep.journal import REASON, SECONDS, UPDATE
    from mtrain_sweep.places import TrialFiles
    from mtrain_sweep.table import STATES, best_trial

    found = starting.open_sweep(folder)
    rows = [
        SweepTrial(
            number=trial.number,
            state=STATES[trial.state],  # type: ignore[arg-type]
            value=trial.value,
            update=trial.user_attrs.get(UPDATE),
            params=dict(trial.params),
            run_dir=TrialFiles(found.folder, trial.number).run_dir,
            reason=trial.user_attrs.get(REASON) or "",
            seconds=trial.user_attrs.get(SECONDS),
        )
        for trial in found.trials
    ]
    best = best_trial(found.definition, found.trials)
    return SweepResult(
        folder=found.folder,
        metric=found.definition.metric,
        direction=found.definition.direction,
        trials=rows,
        best=None if best is None else rows[best.number],
        reason=reason,
    )


@explain_calls
def open_sweep(folder: str | os.PathLike[str] | None) -> SweepResult:
    """Open the folder of a sweep, also while it runs.

    Raises:
        UsageError: it is not the folder of a sweep, or its files are damaged.
    """
    return result_in(None if folder is None else Path(folder).absolute())
