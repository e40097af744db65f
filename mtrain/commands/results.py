"""The results of jobs as objects: metrics, records, curves and checkpoints, for scripts and notebooks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from mtrain.errors import UsageError
from mtrain.records.html import table
from mtrain.spec import remedies

if TYPE_CHECKING:
    from pandas import DataFrame

    from mtrain.records.plots import Curves

ExitReason = Literal["finished", "stopped_early", "interrupted", "unfinished"]
Row = Mapping[str, Any]
"""One record of a run. Nested values are joined by dots, as in ``losses.total`` and ``metrics.accuracy``."""
HIDDEN = ("headline",)
"""Entries of records that rows do not have."""


class Records(Sequence[Row]):
    """Records of a run as plain rows, in the order of the updates; ``pandas()`` makes a table of them.

    Rows have the keys of ``metrics.jsonl``, with nested ones joined by dots. ``kind`` is ``"update"`` or ``"evaluation"``.
    ``update`` is the number of the update, from 0, in the former, and how many had been made in the latter.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = tuple(rows)

    @property
    def updates(self) -> "Records":
        """The rows of updates: losses, learning rate, gradient norm, speed."""
        return self._of("update")

    @property
    def evaluations(self) -> "Records":
        """The rows of evaluations: the metrics."""
        return self._of("evaluation")

    def pandas(self) -> "DataFrame":
        """Return the rows as a pandas DataFrame; a value that a row lacks is NaN.

        Raises:
            UsageError: pandas is not installed.
        """
        remedies.require(["pandas"], what="metrics.pandas()", extra="data")
        from pandas import DataFrame

        return DataFrame([dict(row) for row in self._rows])

    def _of(self, kind: str) -> "Records":
        return Records([row for row in self._rows if row.get("kind") == kind])

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "Records": ...
    def __getitem__(self, index: int | slice) -> "Row | Records":
        return Records(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(len(self))  # rows are mappings, which have no hash; equal records have one length

    def __repr__(self) -> str:
        return f"Records({len(self.updates)} updates, {len(self.evaluations)} evaluations)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Metrics of one evaluation during training."""

    update: int
    """Updates that had been made."""
    epoch: int
    metrics: Mapping[str, float]
    """By name, for example ``AP``, ``AP50`` or ``accuracy``; ``score`` is the one that picks the best checkpoint."""
    checkpoint: Path | None
    """The checkpoint with these weights; None where it was not kept or lies on another host."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainResult:
    """The result of a training job."""

    best: Evaluation | None
    """The evaluation with the highest score; None where none was made."""
    last: Evaluation | None
    run_dir: Path | None
    """The run folder; None where another host has it."""
    exit_reason: ExitReason
    """``finished``: all updates were made. ``stopped_early``: ``train.patience`` ran out. ``interrupted``: Ctrl-C or a signal
    asked for the end; the ranks save their state unless a second request ends them at once, and ``resume`` goes on.
    ``unfinished``, only from ``open_run``: the run is still going on, or it failed or was killed."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``summary.json``: numbers of updates, epochs, samples and seconds, digests of the weights, and more."""

    @property
    def records(self) -> Records:
        """The records of the run so far, each update once. They are read from the run folder at each access.

        Raises:
            UsageError: the run folder is on another host.
        """
        return records_of(_here(self.run_dir))

    @property
    def checkpoint(self) -> Path | None:
        """The best intact checkpoint of the run, else its newest intact one; None where there is none on this host."""
        from mtrain.core.checkpoint import store

        if self.run_dir is None:
            return None
        folder = self.run_dir / "checkpoints"
        return store.best(folder) or store.newest(folder)

    def plot(self) -> "Curves":
        """Return a matplotlib figure with the curves of losses, evaluations, learning rate and speed over the updates.

        A notebook shows it where it is the last value of a cell; ``.savefig("curves.png")`` writes it.

        Raises:
            UsageError: the run has no records yet, or its folder is on another host.
        """
        remedies.require(["matplotlib"], what="plot()", extra="report")
        from mtrain.records.plots import curves

        run_dir = _here(self.run_dir)
        metric = curves(run_dir)
        if metric is None:
            raise UsageError(f"{run_dir}: has no records of updates to draw; train at least one update")
        return metric

    def __repr__(self) -> str:
        words = [self.exit_reason, _progress(self.summary), _headline("best", self.best, self.summary)]
        return f"TrainResult({', '.join(word for word in words if word)}, run_dir={str(self.run_dir)!r})"

    def _repr_html_(self) -> str:
        """Return a table of the best and the last evaluation, which notebooks show."""
        rows = [("best", self.best), ("last", self.last)]
        shown = [(name, evaluation) for name, evaluation in rows if evaluation is not None]
        names = list(_without_absent(self.best or self.last, self.summary))
        lines = [
            [
                name,
                str(e.update),
                *(_number(e.metrics.get(n)) for n in names),
                e.checkpoint.name if e.checkpoint else "",
            ]
            for name, e in shown
        ]
        heading = f"{self.exit_reason.replace('_', ' ')}, {_progress(self.summary)}".removesuffix(", ")
        shown_table = table(["", "updates", *names, "checkpoint"], lines) if lines else ""
        return f"<div><b>{escape(str(self.run_dir))}</b>: {escape(heading)}{shown_table}</div>"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EvaluateResult:
    """Metrics of trained weights on the evaluation split."""

    metrics: Mapping[str, float]
    run_dir: Path | None
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> Records:
        """The metrics as one row, as ``TrainResult.records`` has them for evaluations."""
        return records_of(_here(self.run_dir))

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint or file of weights that was scored; None where this host does not have it."""
        path = Path(str(self.summary.get("weights") or ""))
        return path if self.summary.get("weights") and path.exists() else None

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {_number(value)}" for name, value in self._headline().items())
        return f"EvaluateResult({metrics or 'nothing to score'}, run_dir={str(self.run_dir)!r})"

    def _repr_html_(self) -> str:
        """Return a table of the metrics, which notebooks show."""
        metrics = self._headline()
        source = escape(str(self.summary.get("weights") or self.run_dir))
        return f"<div><b>{source}</b>{table(list(metrics), [[_number(value) for value in metrics.values()]])}</div>"

    def _headline(self) -> Mapping[str, float]:
        from mtrain.records.wording import headline_metrics

        return headline_metrics({"metrics": self.metrics, "headline": self.summary.get("headline")})


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictResult:
    """Predictions on images."""

    predictions: Sequence[Mapping[str, Any]]
    """One entry for each object (detection: COCO's results form) or image (classification), as ``predictions.json`` has it."""
    skipped: Sequence[Mapping[str, str]]
    """``file_name`` and ``reason`` of each image that could not be read."""
    out: Path
    """Folder with ``predictions.json`` and, with ``draw``, the images."""


def train_result(run_dir: Path | None, summary: Mapping[str, Any], *, reason: ExitReason) -> TrainResult:
    """Return the result of a job from its summary."""
    checkpoints = _checkpoints_by_update(run_dir)
    return TrainResult(
        best=_evaluation(summary.get("best"), checkpoints),
        last=_evaluation(summary.get("last"), checkpoints),
        run_dir=run_dir,
        exit_reason=reason,
        summary=summary,
    )


def open_run(run_dir: Path) -> TrainResult:
    """Return the result of a run from its folder, also while the run goes on.

    Raises:
        UsageError: the folder is not one of a training run.
    """
    from mtrain.core.record_files import METRICS
    from mtrain.records.history import read_history

    if not (run_dir / METRICS).is_file():
        what = "has no metrics.jsonl" if run_dir.is_dir() else "no such folder"
        raise UsageError(f"{run_dir}: {what}; give the folder of a training run, such as runs/digits")
    history = read_history(run_dir / METRICS, most_updates=1)
    if not history.start and history.evaluations:
        raise UsageError(f"{run_dir}: is the folder of an evaluation; give the folder of a training run")
    summary = dict(history.end or {})
    for hidden in ("kind", "time"):
        summary.pop(hidden, None)
    # No last record: the run goes on, or was killed. What is known so far comes from its other records.
    if not summary:
        evaluations = [_flattened_evaluation(record) for record in history.evaluations.values()]
        scored = [evaluation for evaluation in evaluations if isinstance(evaluation.get("score"), int | float)]
        summary = {
            "total_updates": history.start.get("total_updates"),
            "updates": max(history.updates, default=-1) + 1,
            "backend": history.start.get("backend"),
            "ranks": history.start.get("ranks"),
            "best": max(scored, key=lambda evaluation: evaluation["score"], default=None),
            "last": evaluations[-1] if evaluations else None,
        }
    return train_result(run_dir, summary, reason=exit_reason(summary))


def exit_reason(summary: Mapping[str, Any]) -> ExitReason:
    """Return why a job ended, from its summary or its last record."""
    if summary.get("reason") == "done":
        return "stopped_early" if summary.get("stopped_by") else "finished"
    return "interrupted" if summary.get("reason") == "interrupted" else "unfinished"


def records_of(run_dir: Path) -> Records:
    """Return the records of updates and evaluations of a run; none where the folder has no records."""
    from mtrain.core.record_files import METRICS
    from mtrain.records.history import read_history

    history = read_history(run_dir / METRICS)
    # An evaluation after n updates has the number n, and the last of these updates the number n - 1.
    records = [*history.updates.items(), *((update - 1, record) for update, record in history.evaluations.items())]
    ordered = sorted(records, key=lambda item: (item[0], item[1].get("kind") == "evaluation"))
    return Records([dict(_flat(record)) for _, record in ordered])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if not prefix and key in HIDDEN:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _flattened_evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"update": record["update"], "epoch": record.get("epoch", 0), **(record.get("metrics") or {})}


def _evaluation(values: Mapping[str, Any] | None, checkpoints: Mapping[int, Path]) -> Evaluation | None:
    if not values:
        return None
    metrics = {name: value for name, value in values.items() if name not in ("update", "epoch")}
    update = int(values["update"])
    return Evaluation(update=update, epoch=int(values["epoch"]), metrics=metrics, checkpoint=checkpoints.get(update))


def _checkpoints_by_update(run_dir: Path | None) -> dict[int, Path]:
    """The intact checkpoints of a run by the number of updates that they hold."""
    from mtrain.core.checkpoint import format, store

    if run_dir is None:
        return {}
    folders = [folder for folder in store.list_all(run_dir / "checkpoints") if store.looks_whole(folder)]
    return {format.progress_of(folder).update: folder for folder in folders}


def _here(run_dir: Path | None) -> Path:
    """Return the run folder.

    Raises:
        UsageError: another host has it.
    """
    if run_dir is None:
        raise UsageError(
            "the run folder is on the first host of the job; copy it here and open it with mtrain.open_run"
        )
    return run_dir


# ------------------------------------------------------------------------------------------------------------- wording
def _progress(summary: Mapping[str, Any]) -> str:
    """Word how far a job came, and where: ``600 of 600 updates, ddp on 2 ranks``."""
    made, total, ranks = summary.get("updates"), summary.get("total_updates"), summary.get("ranks")
    words = [] if made is None else [f"{made} of {total} updates" if total else f"{made} updates"]
    if summary.get("backend"):
        words.append(f"{summary['backend']} on {ranks} rank{'' if ranks == 1 else 's'}")
    return ", ".join(words)


def _without_absent(evaluation: Evaluation | None, summary: Mapping[str, Any]) -> Mapping[str, float]:
    from mtrain.records.wording import headline_metrics

    metrics = {} if evaluation is None else evaluation.metrics
    return headline_metrics({"metrics": metrics, "headline": summary.get("headline")})


def _headline(word: str, evaluation: Evaluation | None, summary: Mapping[str, Any]) -> str:
    """Word the first metric of an evaluation: ``best AP50 0.912 after 600 updates``."""
    metrics = _without_absent(evaluation, summary)
    if evaluation is None or not metrics:
        return ""
    name, value = next(iter(metrics.items()))
    return f"{word} {name} {_number(value)} after {evaluation.update} updates"


def _number(value: Any) -> str:
    from mtrain.records.wording import number

    return number(value)
