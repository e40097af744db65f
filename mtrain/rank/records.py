"""The reports, checkpoints and logs of a rank: rank 0 writes, the others hold silent objects with the same methods."""

import logging
from pathlib import Path

from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.interfaces import Progress
from mtrain.rank.assembly import Assembly
from mtrain.report.reporter import Report, Reporter, SilentReporter
from mtrain.system.runfolder import RunFolder


def report_weights(report: Report, job: Assembly) -> None:
    """Report which arrays of ``model.weights`` were used."""
    for kind, sentence in job.messages:
        report.event(kind, message=sentence)


def writers(job: Assembly, run_folder: RunFolder, progress: Progress) -> tuple[Report, checkpoint.CheckpointStore]:
    """Return the report and the checkpoints of a training run."""
    if job.session.collective.rank != 0:
        return SilentReporter(), checkpoint.NoCheckpoints()
    rule = job.spec.checkpoint
    store = checkpoint.Checkpoints(
        run_folder.checkpoints, keep_last=rule.keep_last, keep_best=rule.keep_best, asynchronous=rule.asynchronous
    )
    return reporter(job, run_folder, progress), store


def reporter(job: Assembly, run_folder: RunFolder, progress: Progress) -> Report:
    """Return the report of a job that goes on from ``progress``."""
    if job.session.collective.rank != 0:
        return SilentReporter()
    spec = job.spec.report
    return Reporter(run_folder.path, tensorboard=spec.tensorboard, plots=spec.plots, start_update=progress.update)


def log_to_stderr() -> None:
    """Send log messages to the log of this rank."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def text_of(path: Path | None) -> str | None:
    """Return a path as text for a record."""
    return None if path is None else str(path)
