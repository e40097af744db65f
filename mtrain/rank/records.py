"""The reports, checkpoints and logs of a rank: rank 0 writes, the others hold objects with the same methods."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.interfaces import Collective, Progress, RankSession
from mtrain.core.interfaces.reporter import ReportedRun, Reporter
from mtrain.rank.spec.assembly import Assembly
from mtrain.records import choosing
from mtrain.records.live import LiveFigures
from mtrain.records.reporter import Report, RunReport
from mtrain.records.run_files import RunFiles
from mtrain.spec.resolved import Resolved
from mtrain.system.runfolder import RunFolder
from mtrain.weights.backup.copier import Copies


def report_weights(report: Report, job: Assembly) -> None:
    """Report what was chosen for ``auto``, and which arrays of ``model.weights`` were used."""
    for kind, sentence in job.messages:
        report.event(kind, message=sentence)


def checkpoints_of(spec: Any, run_folder: RunFolder, rank: int, copies: Copies) -> checkpoint.CheckpointStore:
    """Return the checkpoints of a training run; each is copied once it is written."""
    if rank != 0:
        return checkpoint.NoCheckpoints(asynchronous=spec.checkpoint.asynchronous)
    rule = spec.checkpoint
    return checkpoint.Checkpoints(
        run_folder.checkpoints,
        keep_last=rule.keep_last,
        keep_best=rule.keep_best,
        asynchronous=rule.asynchronous,
        on_written=copies.add,
    )


def reporter(job: Assembly, run_folder: RunFolder, progress: Progress) -> Report:
    """Return the report of a job that goes on from ``progress``."""
    run = reported_run(job.spec, run_folder, job.session.collective, start_update=progress.update)
    return report_of(job.resolved, run)


def reported_run(spec: Any, run_folder: RunFolder, collective: Collective, *, start_update: int) -> ReportedRun:
    """Return the facts about this rank's run that its reporters receive."""
    return ReportedRun(
        folder=run_folder.path,
        rank=collective.rank,
        size=collective.size,
        start_update=start_update,
        spec=spec.model_dump(mode="json"),
    )


def report_of(resolved: Resolved, run: ReportedRun, more: Sequence[tuple[str, Reporter]] = ()) -> Report:
    """Return the report of one rank: the files of the run on rank 0, the reporters of the spec, and ``more``.

    Raises:
        UsageError: a reporter is unknown or used wrongly.
    """
    spec = resolved.spec
    files = RunFiles(run.folder, plots=spec.report.plots) if run.rank == 0 else None
    reporters, failures = choosing.make_reporters(spec.report, run, registry=resolved.registry)
    if spec.report.metrics_port is not None:
        more = [*more, ("live metrics", LiveFigures({}, run))]
    report = RunReport(files, [*more, *reporters])
    for name, error in failures:
        report.failed(name, error)
    return report


def report_update(report: Report, record: Mapping[str, Any]) -> None:
    """Report the record of one update, with a warning if the update was skipped."""
    report.update(record)
    if not math.isfinite(record["gradient_norm"]):
        report.event(
            "warning",
            message=f"update {record['update']}: the gradient was not finite; the update was skipped, weights are as "
            f"before ({record['skipped_updates']} so far)",
        )


def progress_summary(
    reason: str, progress: Progress, *, run: Path, session: RankSession, backend: str, total_updates: int | None
) -> dict[str, Any]:
    """Return the part of a summary that says which job has ended, why, and how far it came."""
    return {
        "reason": reason,
        "name": run.name,
        "backend": backend,
        "ranks": session.collective.size,
        "updates": progress.update,
        "total_updates": total_updates,
        "epochs": progress.epoch,
        "samples": progress.samples,
        "skipped_updates": progress.skipped,
    }


def left_out(reason: str, not_done: Sequence[str]) -> dict[str, Any]:
    """Return the part of a summary that says what a job leaves out because it was asked to end.

    A scheduler gives it seconds, which belong to its state. ``not_done``: an evaluation that is due, and images; the job
    makes up for them once it goes on.
    """
    return {"left_out": list(not_done) if reason == "interrupted" else []}


def places_summary(checkpoints: checkpoint.CheckpointStore) -> dict[str, Any]:
    """Return the part of a summary that says where the checkpoints of a finished job are."""
    return {
        "best_checkpoint": text_of(checkpoints.best() or checkpoints.newest()),
        "newest_checkpoint": text_of(checkpoints.newest()),
    }


def log_to_stderr() -> None:
    """Send log messages to the log of this rank."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def text_of(path: Path | None) -> str | None:
    """Return a path as text for a record."""
    return None if path is None else str(path)
