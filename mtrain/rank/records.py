"""The records of a training on one rank, of a spec and of a script alike: report, checkpoints and their copies, logs."""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.collective import barrier, broadcast
from mtrain.core.interfaces import Backend, Collective, Module, Part, Progress, RankSession, StateStream, Why
from mtrain.core.interfaces.reporter import ReportedRun, Reporter
from mtrain.core.state import streams
from mtrain.core.state.digest import digest_of_stream
from mtrain.rank import copying
from mtrain.rank.spec import precision
from mtrain.rank.spec.assembly import Assembly, find_unused_gpus
from mtrain.records import choosing
from mtrain.records.live import LiveFigures
from mtrain.records.reporter import Report
from mtrain.records.run_files import RunFiles
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved
from mtrain.system.devices import device_words
from mtrain.system.runfolder import RunFolder, adopt

log = logging.getLogger(__name__)

RESULT_PARTS: tuple[Part, ...] = ("weights", "ema")
"""Parts of the state whose digests are in the summary."""


class TrainingRecords:
    """Rank 0 writes them; every rank must call the same methods."""

    def __init__(
        self, spec: Spec, run_folder: RunFolder, session: RankSession, report: Report, saved: store.Saved | None
    ) -> None:
        """``saved``: the checkpoint that is resumed; None: the training starts anew."""
        self._spec = spec
        self._run_folder = run_folder
        self._session = session
        self._saved = saved
        self.report = report
        self.copies = copying.make_copies(spec, run_folder, session.collective)
        self.checkpoints = self._make_checkpoints()
        self._device = session.device
        """Description of this rank's device; once ``start`` was called, of all ranks' devices."""

    def _make_checkpoints(self) -> store.CheckpointStore:
        """Return the checkpoints of the run; each is copied once it is written."""
        rule = self._spec.checkpoint
        if self._session.collective.rank != 0:
            return store.NoCheckpoints(asynchronous=rule.asynchronous)
        return store.Checkpoints(
            self._run_folder.checkpoints,
            keep_last=rule.keep_last,
            keep_best=rule.keep_best,
            asynchronous=rule.asynchronous,
            on_written=self.copies.add,
        )

    def start(self, backend: Backend, *, resume: Path | None, fields: Mapping[str, Any]) -> None:
        """Write the first record, which says what is about to be trained, with further ``fields``; every rank must call."""
        collective = self._session.collective
        self._device = device_words(collective.all_gather(self._session.device))
        if self._saved is not None:
            barrier(collective)  # every rank has restored the checkpoint
            if collective.rank == 0:
                adopt(self._run_folder)
        progress = Progress() if self._saved is None else self._saved.progress
        self.report.event(
            "start",
            update=progress.update,
            epoch=progress.epoch,
            ranks=collective.size,
            device=self._device,
            backend=self._spec.backend.name,
            resumed_from=text_of(resume),
            **fields,
        )
        if unused := find_unused_gpus(self._spec, backend, self._session, os.environ):
            self.report.event("warning", message=unused)

    def report_changes(self, spec: Spec, *, shards: int) -> None:
        """Warn of what goes on otherwise than before the checkpoint that is resumed.

        ``shards``: number of parts of an update that draw random numbers of their own.
        """
        if self._saved is None:
            return
        warnings = (
            precision.changed_since(self._saved.spec, spec),
            compare_layers(self._saved.meta["extra"], shards),
        )
        for warning in filter(None, warnings):
            self.report.event("warning", message=warning)

    def report_update(self, record: Mapping[str, Any]) -> None:
        """Report an update."""
        self.report.update(record)
        if not math.isfinite(record["gradient_norm"]):
            self.report.event(
                "warning",
                message=f"update {record['update']}: the gradient was not finite; the update was skipped, weights are as "
                f"before ({record['skipped_updates']} so far)",
            )

    def check(self) -> None:
        """Notice a failed background save before the next save does, and report copies.

        Raises:
            TrainingError: A background save has failed.
        """
        self.checkpoints.check()
        copying.report(self.copies, self.report)

    def stream(self, *stepped: tuple[str, Module, Any]) -> StateStream:
        """Return a stream of the state that ``save`` may read while training goes on; every rank must call.

        ``stepped``: model and optimizer as ``RankSession.prepare`` returned them, with the name of the model; a single one has
        none.
        """
        # Earlier copies are dropped before new ones are made: else memory would hold two copies of the state at once.
        self.checkpoints.wait()
        copied = self._spec.checkpoint.asynchronous
        return streams.of_models(self._session, stepped, copied=copied)

    def save(
        self,
        state: StateStream,
        progress: Progress,
        *,
        score: float | None,
        why: Why,
        content: Mapping[str, Any],
        names: Sequence[str] = (),
    ) -> None:
        """Write a checkpoint in the background; ``content``: its ``spec`` and ``extra``; ``names``: see ``keep_next``."""
        self.checkpoints.keep_next(names)
        self.checkpoints.save(state, progress, score=score, **content)
        folder = str(self._run_folder.checkpoints)
        kept = {"names": list(names)} if names else {}
        self.report.event("checkpoint", update=progress.update, folder=folder, score=score, why=why, **kept)

    def settle(self, reason: str, *, stop: Callable[[], bool]) -> None:
        """Wait for the last checkpoint and its copy; every rank must call, unless ``reason`` is "failed"."""
        try:
            self.checkpoints.wait()
        except Exception:
            if reason != "failed":
                raise
            log.exception("a checkpoint could not be written")
        if reason != "failed":
            # A job that is ending was asked to; a second request then ends its processes.
            stop = (lambda: False) if reason == "interrupted" else stop
            copying.settle(self._spec, self.copies, self._session.collective, self.report, stop=stop)
        self.copies.close()

    def summary(
        self, reason: str, progress: Progress, *, total_updates: int | None, not_done: Sequence[str]
    ) -> dict[str, Any]:
        """Return what the summaries of all trainings have: which job has ended, why, and how far it came.

        ``not_done``: an evaluation that is due, and images, which a job that was asked to end leaves out.
        """
        return {
            "reason": reason,
            "name": self._run_folder.path.name,
            "backend": self._spec.backend.name,
            "ranks": self._session.collective.size,
            "updates": progress.update,
            "total_updates": total_updates,
            "epochs": progress.epoch,
            "samples": progress.samples,
            "skipped_updates": progress.skipped,
            "device": self._device,
            # A scheduler gives a job that it ends seconds, which belong to the state. The job makes up for the rest once it goes on.
            "left_out": list(not_done) if reason == "interrupted" else [],
            **self.copies.summary(),
        }

    def result(self, *stepped: tuple[str, Module, Any]) -> dict[str, Any]:
        """Return what the summary of a training that is done has in addition; every rank must call. See ``stream``."""
        state = streams.of_models(self._session, stepped, copied=False)
        # Every rank computes them, because the state may be gathered from all; that of rank 0 is what all report.
        digests = {f"{part}_sha256": digest_of_stream(state, part) for part in RESULT_PARTS}
        return broadcast(self._session.collective, digests) | {
            "best_checkpoint": text_of(self.checkpoints.best() or self.checkpoints.newest()),
            "newest_checkpoint": text_of(self.checkpoints.newest()),
        }

    def end(self, reason: str, summary: Mapping[str, Any], **fields: Any) -> None:
        """Write the last record, with further ``fields``, and the summary; unless ``reason`` is "failed", every rank must call."""
        self.report.event("end", **summary, **fields)
        self.report.close(summary)
        if reason == "interrupted":
            # When one rank ends, launchers soon end the others, and rank 0 must have written everything by then.
            barrier(self._session.collective)


def report_weights(report: Report, job: Assembly) -> None:
    """Report what was chosen for ``auto``, and which arrays of ``model.weights`` were used."""
    for kind, sentence in job.messages:
        report.event(kind, message=sentence)


def reporter(job: Assembly, run_folder: RunFolder, progress: Progress) -> Report:
    """Return the report of a job that goes on from ``progress``."""
    run = describe_run(job.spec, run_folder, job.session.collective, start_update=progress.update)
    return report_of(job.resolved, run)


def describe_run(spec: Any, run_folder: RunFolder, collective: Collective, *, start_update: int) -> ReportedRun:
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
    report = Report(files, [*more, *reporters])
    for name, error in failures:
        report.report_failure(name, error)
    return report


RANDOM_SHARDS = "random_shards"
"""Key in ``extra`` of a checkpoint: number of parts of an update that draw random numbers of their own."""


def compare_layers(extra: Mapping[str, Any] | None, shards: int) -> str:
    """Return a warning if a job draws other random numbers than the one that it continues; else an empty text.

    ``extra``: that of the checkpoint; None: the job starts anew. ``shards``: ranks times micro batches of this job.
    """
    # torch and Paddle seed the random layers of a user's own module for each shard of an update.
    before = None if extra is None else extra.get(RANDOM_SHARDS)
    if before in (None, shards):
        return ""
    return (
        f"the checkpoint was trained with updates in {before} parts (ranks x micro batches), this job divides them into {shards}: "
        "dropout and other random layers of your module draw other numbers from here on; to continue exactly, keep the product"
    )


def log_to_stderr() -> None:
    """Send log messages to the log of this rank."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def text_of(path: Path | None) -> str | None:
    """Return a path as text for a record."""
    return None if path is None else str(path)
