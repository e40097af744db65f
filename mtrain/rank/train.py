"""Training on one rank: the functions that the trainer calls, and what they record."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain.core import cadence
from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.checkpoint.sharing import load_everywhere
from mtrain.core.collective import barrier
from mtrain.core.evaluate import evaluate, interruptible, narrowing
from mtrain.core.interfaces import Evaluator, Progress, TaskData, Why
from mtrain.core.schedule import Schedule, total_updates
from mtrain.core.trace import Shares, Tracer, traffic
from mtrain.core.trainer import Cadences, Hooks, Job, Trainer
from mtrain.errors import Interrupted, SpecError
from mtrain.rank import copying, kept, precision, process
from mtrain.rank.assembly import Assembly, assembled, augmented, open_task, unused_gpus
from mtrain.rank.draws import KEY
from mtrain.rank.inspection import Inspection
from mtrain.rank.records import (
    checkpoints_of,
    left_out,
    log_to_stderr,
    progress_summary,
    report_update,
    report_weights,
    reporter,
    result_summary,
)
from mtrain.report.reporter import PICTURES, RESULTS
from mtrain.system.devices import device_words
from mtrain.system.runfolder import RunFolder, adopt

log = logging.getLogger(__name__)


def train(
    spec: Any, run_folder: RunFolder, resume: Path | None, *, stop: process.StopRequest, leave: process.Leaving
) -> None:
    """Train to the end, or from ``resume`` to the end."""
    log_to_stderr()
    started = time.perf_counter()
    data = open_task(spec)
    with assembled(spec, data, leave=leave, training=True, restored=resume is not None) as job:
        saved = None if resume is None else load_everywhere(resume, job.session.collective)
        run = TrainingRun(job, data, run_folder, Results.of(saved))
        if saved is not None:
            run.check_continues()
            job.session.restore(job.model, job.optimizer, saved.state)
            run.adopt_spec()
        run.announce(resumed_from=resume)
        copying.catch_up(run.copies, run_folder)
        run.report_precision(saved)
        run.report_teacher(saved)
        run.restore_draws(saved)
        run.to_its_end(started, stop=stop, leave=leave)


def train_repeatedly(
    spec: Any, run_folder: RunFolder, rounds: Sequence[Path], *, stop: process.StopRequest, leave: process.Leaving
) -> None:
    """Train once into each folder of ``rounds``, then into ``run_folder``, each time from the same start.

    Only the last training is traced as the spec says. The others count bytes and waits instead, as a comparison times them.
    """
    log_to_stderr()
    started = time.perf_counter()
    data = open_task(spec)
    timed = spec.model_copy(update={"report": spec.report.model_copy(update={"trace": "traffic"})})
    with assembled(timed, data, leave=leave, training=True) as job:
        beginning = job.session.state(job.model, job.optimizer)
        for folder in rounds:
            _train_once(job, data, RunFolder(folder), started, stop=stop, leave=leave)
            job.session.restore(job.model, job.optimizer, beginning)
            started = time.perf_counter()
        _train_once(replace(job, spec=spec), data, run_folder, started, stop=stop, leave=leave)


def _train_once(
    job: Assembly,
    data: TaskData,
    run_folder: RunFolder,
    started: float,
    *,
    stop: process.StopRequest,
    leave: process.Leaving,
) -> None:
    """Train an assembled job from its beginning to its end."""
    run = TrainingRun(job, data, run_folder, Results.of(None))
    run.announce(resumed_from=None)
    run.to_its_end(started, stop=stop, leave=leave)


class TrainingRun:
    """One rank's training run: the functions that the trainer calls, and the report and checkpoints that it writes."""

    def __init__(self, job: Assembly, data: TaskData, run_folder: RunFolder, result: "Results") -> None:
        self.job = job
        self._data = data
        self.run_folder = run_folder
        self._draws = job.draws(data)
        self.loader = job.training_loader(self._draws)
        self._tracer: Tracer | None = None
        self._shares = Shares()
        if job.spec.report.trace == "state":
            self._tracer = Tracer(
                job.session.collective,
                job.optimizer.groups,
                lambda: job.session.state(job.model, job.optimizer),
                accumulate=job.recipe.accumulate,
            )
            self.loader = self._tracer.watch(self.loader)
        self.updates = total_updates(job.spec, self.loader.updates_per_epoch)
        self.report = reporter(job, run_folder, result.progress)
        collective = job.session.collective
        self.copies = copying.made(job.spec, run_folder, collective)
        self.checkpoints = checkpoints_of(job.spec, run_folder, collective.rank, self.copies)
        self._inspection = Inspection(job, self.report, total_updates=self.updates)
        self._result = result
        self._evaluations = job.evaluation_loader() if job.spec.evaluate.enabled else None
        self._stop: Callable[[], bool] = lambda: False
        self._save_request = process.SaveRequest()
        self.device = job.session.device
        """Description of this rank's device; once ``announce`` was called, of all ranks' devices."""

    def to_its_end(self, started: float, *, stop: process.StopRequest, leave: process.Leaving) -> None:
        """Train to the end, and write the last record; ``started``: ``time.perf_counter()`` at the start of the job."""
        try:
            self.trainer(stop).run(self.progress)
        except Interrupted:
            self.end("interrupted", seconds=time.perf_counter() - started)
            raise
        except BaseException as error:
            leave(error)
            try:
                self.end("failed", seconds=time.perf_counter() - started)
            except Exception:
                log.exception("after the failure")
            raise
        self.end("done", seconds=time.perf_counter() - started)

    @property
    def progress(self) -> Progress:
        """Progress at the last save, or at the start."""
        return self._result.progress

    def check_continues(self) -> None:
        """See ``cadence.check_continues``."""
        cadence.check_continues(
            self.progress,
            updates_per_epoch=self.loader.updates_per_epoch,
            global_batch=self.job.spec.train.batch_size,
        )

    def trainer(self, stop: process.StopRequest) -> Trainer:
        """Make the training loop with everything that it calls."""
        self._stop = lambda: self._asked_to_end(stop)
        self._save_request = stop.save
        job, spec = self.job, self.job.spec
        schedule = Schedule(spec, updates_per_epoch=self.loader.updates_per_epoch, total_updates=self.updates)
        return Trainer(
            Job(
                session=job.session,
                model=job.model,
                optimizer=job.optimizer,
                loader=self.loader,
                schedule=schedule,
                total_updates=self.updates,
                accumulate=job.recipe.accumulate,
                global_batch=spec.train.batch_size,
                shares=job.shares,
                seeds_shards=job.plugin.native,
                # A trace looks at the state after every update, which must be that of the record.
                arranged=job.plugin.arranged,
                late=job.session.late and spec.report.trace == "none",
            ),
            Cadences(
                report_every=spec.report.every_updates,
                evaluations=cadence.evaluations(spec.evaluate),
                saves=cadence.saves(spec.checkpoint),
                evaluate_at_end=spec.evaluate.at_end and spec.evaluate.enabled,
                patience=spec.train.patience,
                max_nonfinite=spec.train.max_nonfinite,
            ),
            Hooks(
                on_update=self.updated,
                evaluate=self.evaluate,
                inspect=self._inspection,
                save=self.save,
                stop=self._stop,
                save_requested=self._save_request,
            ),
        )

    def _asked_to_end(self, stop: process.StopRequest) -> bool:
        """Return whether this rank was asked to end. Also notices a failed background save before the next save does.

        Raises:
            TrainingError: A background save has failed.
        """
        self.checkpoints.check()
        copying.report(self.copies, self.report)
        return stop()

    def adopt_spec(self) -> None:
        """Make this job's spec that of the run folder, once all ranks have restored the checkpoint."""
        barrier(self.job.session.collective)  # every rank has restored
        if self.job.session.collective.rank == 0:
            adopt(self.run_folder)

    def announce(self, *, resumed_from: Path | None) -> None:
        """Write the first record of the report, which says what is about to be trained; every rank must call."""
        job = self.job
        parameters = sum(len(group) for group in job.optimizer.groups)
        self.device = device_words(job.session.collective.all_gather(job.session.device))
        self.report.event(
            "start",
            update=self._result.progress.update,
            total_updates=self.updates,
            updates_per_epoch=self.loader.updates_per_epoch,
            epoch=self._result.progress.epoch,
            ranks=job.session.collective.size,
            device=self.device,
            precision=job.recipe.precision,
            backend=job.spec.backend.name,
            model=job.spec.model.name,
            classes=list(job.task.class_names),
            train_samples=job.data.length("train"),
            val_samples=job.data.length("val"),
            trained_arrays=parameters,
            details=dict(job.task.details),
            resumed_from=None if resumed_from is None else str(resumed_from),
            **({} if self._tracer is None else {"trace": self._tracer.look()}),
        )
        report_weights(self.report, job)
        if unused := unused_gpus(job.spec, job.backend, job.session, os.environ):
            self.report.event("warning", message=unused)

    def report_precision(self, saved: checkpoint.Saved | None) -> None:
        """Warn if the job goes on in another precision than that of the resumed checkpoint."""
        if warning := precision.changed_since(None if saved is None else saved.spec, self.job.spec):
            self.report.event("warning", message=warning)

    def report_teacher(self, saved: checkpoint.Saved | None) -> None:
        """Warn if the resumed checkpoint was trained with another teacher than this job's."""
        before = self.job.teacher if saved is None else saved.meta["extra"].get("teacher")
        if before != self.job.teacher:
            what = "none" if before is None else "other weights"
            message = (
                f"train.distil: the checkpoint was trained with {what} as its teacher; the job goes on with this spec's"
            )
            self.report.event("warning", message=message)

    def restore_draws(self, saved: checkpoint.Saved | None) -> None:
        """Go on drawing samples as the resumed job did; warn if it chose them in another way."""
        before = None if saved is None else saved.meta["extra"].get(KEY)
        if self._draws is not None and before is not None:
            self._draws.restore(before)
        elif saved is not None and (self._draws is None) != (before is None):
            message = (
                f"the checkpoint was trained on samples {'drawn by weights' if before else 'of which each came once an epoch'}; "
                "from here on, this job's spec chooses them in the other way"
            )
            self.report.event("warning", message=message)

    def updated(self, record: Mapping[str, Any]) -> None:
        """Report the record of one update, with a warning if the update was skipped."""
        self._shares.take(record)
        unit = {"unit": "samples"} if self.job.plugin.native else {}
        report_update(self.report, {**record, **unit, **self._traced()})

    def _traced(self) -> dict[str, Any]:
        """Return the fields that ``report.trace`` adds to the record of an update; every rank must call."""
        if self.job.spec.report.trace == "none":
            return {}
        return {**traffic(), **({} if self._tracer is None else {"trace": self._tracer.after_update()})}

    def evaluate(self, progress: Progress) -> Mapping[str, float]:
        """Score the averaged weights; every rank must call."""
        job, began = self.job, time.perf_counter()
        assert self._evaluations is not None, "nothing is evaluated where that is not enabled"
        evaluator = job.data.evaluator()
        figures = evaluate(
            job.session,
            job.model,
            job.optimizer,
            interruptible(self._evaluations.micro_batches(0), collective=job.session.collective, stop=self._stop),
            predictions=job.plugin.predictions,
            evaluator=evaluator,
            augmented=augmented(job.spec, job.plugin),
            narrow=narrowing(job.session, job.plugin.narrowed),
        )
        if not figures:
            message = f"update {progress.update}: not scored: {'; '.join(evaluator.remarks())}"
            self.report.event("warning", message=message)
            return figures
        figures["score"] = _score(figures, job.spec.evaluate.score)
        best = self._result.take(figures, progress, evaluator)
        self._result.evaluator = evaluator
        if self._draws is not None:
            self._draws.evaluated(figures)
        self.report.evaluation(
            figures,
            update=progress.update,
            epoch=progress.epoch,
            headline=list(evaluator.headline),
            best=best,
            seconds=time.perf_counter() - began,
            **({"pictures": self._draw()} if self.report.wants_pictures else {}),
        )
        return figures

    def save(self, progress: Progress, score: float | None, why: Why) -> None:
        """Write a checkpoint in the background; every rank must call."""
        job = self.job
        if why == "requested":
            self._save_request.served()
        state = job.session.state(job.model, job.optimizer)
        self._result.progress = progress
        self.checkpoints.save(
            state,
            progress,
            score=score,
            spec=job.spec.model_dump(mode="json"),
            extra={
                **self._data.labels(),
                "details": dict(job.task.details),
                "results": self._result.figures(),
                **({} if job.teacher is None else {"teacher": job.teacher}),
                **({} if self._draws is None else {KEY: self._draws.state()}),
            },
        )
        folder = str(self.run_folder.checkpoints)
        self.report.event("checkpoint", update=progress.update, folder=folder, score=score, why=why)

    def end(self, reason: str, *, seconds: float) -> None:
        """Wait for unfinished saves, and write the last record and the summary.

        Every rank must call, unless ``reason`` is "failed". A job that ends early because of ``train.patience`` is
        "done" too; its ``stopped_by`` is "patience".
        """
        self.checkpoints.wait()
        if reason != "interrupted":
            self._close_loaders()
        self._end_copies(reason)
        result, job = self._result, self.job
        summary: dict[str, Any] = {
            **progress_summary(
                reason,
                result.progress,
                run=self.run_folder.path,
                backend=job.spec.backend.name,
                session=job.session,
                total_updates=self.updates,
            ),
            "device": self.device,
            "stopped_by": "patience" if reason == "done" and result.progress.update < self.updates else None,
            "patience": job.spec.train.patience,
            "save_wait_seconds": round(self.checkpoints.waited_s, 3),
            "seconds": round(seconds, 2),
            "best": result.best,
            "last": result.last,
            "headline": result.headline,
            "remarks": result.remarks,
            **left_out(reason, self._not_done(result.progress)),
            **self.copies.summary(),
        }
        if reason == "done":
            summary |= result_summary(job.session.state(job.model, job.optimizer), self.checkpoints)
            measured = {**job.session.measure(), **self._shares.summary()}
            summary["measured"] = job.session.collective.all_gather(measured)
        pictures = {"pictures": self._draw()} if reason == "done" else {}
        if reason == "done":
            self._keep()
        self.report.event("end", **summary, **pictures)
        self.report.close(summary)
        if reason == "interrupted":
            # When one rank ends, launchers soon end the others, and rank 0 must have written everything by then.
            barrier(self.job.session.collective)
            self._close_loaders()

    def _end_copies(self, reason: str) -> None:
        """Wait for the copy of the last checkpoint; every rank must call, unless ``reason`` is "failed"."""
        # A job that is ending was asked to; a second request then ends its processes.
        stop = (lambda: False) if reason == "interrupted" else self._stop
        if reason != "failed":
            copying.settle(self.job.spec, self.copies, self.job.session.collective, self.report, stop=stop)
        self.copies.close()

    def _not_done(self, progress: Progress) -> list[str]:
        """Return what a job that ends now has not done yet."""
        due = cadence.evaluations(self.job.spec.evaluate).due(progress) and progress.scored_update != progress.update
        pictures = [RESULTS, PICTURES] if self.job.spec.report.plots else []
        return [*(["evaluation"] if due else []), *pictures]

    def _close_loaders(self) -> None:
        self.loader.close()
        if self._evaluations is not None:
            self._evaluations.close()

    def _draw(self) -> list[str]:
        """Draw predictions of the last evaluation; return the names of the files, none if there is nothing to draw."""
        evaluator = self._evaluated()
        return [] if evaluator is None else kept.draw(self._data, evaluator, self.run_folder.path, self.report)

    def _keep(self) -> None:
        """Keep what pages show beside records and predictions."""
        if (evaluator := self._evaluated()) is not None:
            kept.keep(self._data, evaluator, self.run_folder.path, last=self._result.last, report=self.report)

    def _evaluated(self) -> Evaluator | None:
        """Return the evaluator of the last evaluation, if this rank keeps pictures of it."""
        evaluator, job = self._result.evaluator, self.job
        keeps = job.spec.report.plots and job.session.collective.rank == 0
        return evaluator if keeps and evaluator is not None and evaluator.partial() else None


@dataclass(kw_only=True)
class Results:
    """Results of a run so far, for its summary."""

    progress: Progress
    best_score: float = float("-inf")
    best: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    headline: list[str] = field(default_factory=list)
    """Names of the most important figures."""
    remarks: list[str] = field(default_factory=list)
    """Remarks about the best evaluation."""
    evaluator: Evaluator | None = None
    """The evaluator of the last evaluation, with its predictions."""

    @classmethod
    def of(cls, saved: checkpoint.Saved | None) -> "Results":
        """Make the results at the start of a job: empty, or those of the checkpoint that it resumes."""
        if saved is None:
            return cls(progress=Progress())
        figures = saved.meta["extra"].get("results", {})
        return cls(progress=saved.progress, best_score=saved.progress.best, **figures)

    def figures(self) -> dict[str, Any]:
        """Return the results that a checkpoint stores."""
        return {
            "best": dict(self.best),
            "last": dict(self.last),
            "headline": list(self.headline),
            "remarks": list(self.remarks),
        }

    def take(self, figures: Mapping[str, float], progress: Progress, evaluator: Evaluator) -> bool:
        """Store the figures of an evaluation; return whether they are the best so far."""
        self.last = {"update": progress.update, "epoch": progress.epoch, **figures}
        self.headline = list(evaluator.headline)
        best = figures["score"] > self.best_score
        if best:
            self.best_score, self.best, self.remarks = figures["score"], self.last, evaluator.remarks()
        return best


def _score(figures: Mapping[str, float], name: str | None) -> float:
    """Return the figure to maximise: ``evaluate.score`` if set, else the evaluator's own score.

    Raises:
        SpecError: There is no such figure, for example because its class does not occur in the data.
    """
    if name is not None and name not in figures:
        raise SpecError(f"evaluate.score: {name!r} given, this evaluation has {', '.join(figures)}")
    return figures[name or "score"]
