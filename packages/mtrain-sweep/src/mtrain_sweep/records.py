"""What a trial has achieved so far, read from the records of its run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtrain.core.record_files import METRICS
from mtrain.errors import UsageError
from mtrain.records.history import History, Tail
from mtrain.spec.suggest import hint
from mtrain.system import runfolder
from mtrain_sweep.definition import SweepDefinition


class Score(NamedTuple):
    """The metric after one evaluation."""

    update: int
    value: float


class TrialRecords:
    """Follows the evaluations of one run, whether it grows, has ended or is resumed."""

    def __init__(self, run_dir: Path, definition: SweepDefinition) -> None:
        self._run_dir = run_dir
        self._definition = definition
        self._tail = Tail(run_dir / METRICS, from_start=True)
        self._history = History()

    def scores(self) -> list[Score]:
        """Return the metric after each evaluation so far, by update; NaN where it is not a finite number.

        Raises:
            UsageError: evaluations have no such metric.
        """
        for record in self._tail.read():
            self._history.add(record)
        evaluations = sorted(self._history.evaluations.items())
        return [Score(update, self._value(record)) for update, record in evaluations]

    def _value(self, record: Mapping[str, Any]) -> float:
        metrics, metric = record.get("metrics") or {}, self._definition.metric
        if metric not in metrics:
            known = [name for name in metrics if "/" not in name]
            raise UsageError(f"--metric {metric}: evaluations have no such metric{hint(metric, known)}")
        value = metrics[metric]
        return float(value) if isinstance(value, int | float) else math.nan

    def is_done(self) -> bool:
        """Return whether the run has made all its updates, or has stopped early by itself."""
        return runfolder.read_summary(self._run_dir).get("reason") == "done"


def best(scores: list[Score], definition: SweepDefinition) -> Score | None:
    """Return the best score, the earliest of equal ones; None where no value is finite."""
    chosen: Score | None = None
    for score in scores:
        if math.isfinite(score.value) and definition.better(score.value, None if chosen is None else chosen.value):
            chosen = score
    return chosen
