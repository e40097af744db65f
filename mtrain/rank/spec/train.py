"""Training on one rank: the functions that the trainer calls, and what they record."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.checkpoint.sharing import load_everywhere
from mtrain.core.interfaces import Evaluator, Progress, TaskData, Why
from mtrain.core.record_files import IMAGES, RESULTS
from mtrain.core.samples import resumed_samples
from mtrain.core.samples.feed import LoaderFeed
from mtrain.core.update import cadence
from mtrain.core.update.cadence import Cadences
from mtrain.core.update.loop import Hooks, Job, Loop
from mtrain.core.update.schedule import Schedule, total_updates
from mtrain.core.update.stepping import Stepper
from mtrain.core.update.trainer import train as run_loop
from mtrain.errors import Interrupted, SpecError
from mtrain.rank import copying, process
from mtrain.rank.profiling import Profile
from mtrain.rank.records import RANDOM_SHARDS, TrainingRecords, report_weights, reporter
from mtrain.rank.spec import kept
from mtrain.rank.spec.assembly import Assembly, assemble, open_task
from mtrain.rank.spec.draws import KEY
from mtrain.rank.spec.inspection import Inspection
from mtrain.rank.tracing import Tracing
from mtrain.rank.utilisation import Utilisation, peak_of
from mtrain.spec.disclosure import without_places
from mtrain.spec.resolved import Resolved
from mtrain.system.runfolder import RunFolder

log = logging.getLogger(__name__)


def train(
    resolved: Resolved, run_folder: RunFolder, resume: Path | None, *, stop: process.StopRequest, leave: process.Leaving
) -> None:
    """Train to the end, or from ``resume`` to the end."""
    started = time.perf_counter()
    data = open_task(resolved)
    with assemble(resolved, data, leave=leave, training=True, restored=resume is not None) as job:
        saved = None if resume is None else load_everywhere(resume, job.session.collective)
        run = TrainingRun(job, data, run_folder, saved, stop=stop)
        if saved is not None:
            run.check_continues(saved)
            job.plugin.check_resumed(job.task.details, saved.meta["extra"].get("details") or {})
            job.session.restore(job.model, job.optimizer, saved.state)
        run.to_its_end(resume, started, leave=leave)


def train_repeatedly(
    resolved: Resolved,
    run_folder: RunFolder,
    rounds: Sequence[Path],
    *,
    stop: process.StopRequest,
    leave: process.Leaving,
) -> None:
    """Train once into each folder of ``rounds``, then into ``run_folder``, each time from the same start.

    Only the last training is traced as the spec says. The others count bytes and waits instead, as a comparison times them.
    """
    started = time.perf_counter()
    data = open_task(resolved)
    spec = resolved.spec
    timed = spec.model_copy(update={"report": spec.report.model_copy(update={"trace": "traffic"})})
    with assemble(resolved.with_spec(timed), data, leave=leave, training=True) as job:
        beginning = job.session.state(job.model, job.optimizer)
        for folder in rounds:
            TrainingRun(job, data, RunFolder(folder), None, stop=stop).to_its_end(None, started, leave=leave)
            # Optimizer and averages included, so that each training begins as the first one did.
            job.session.restore(job.model, job.optimizer, beginning)
            started = time.perf_counter()
        last = TrainingRun(replace(job, resolved=resolved), data, run_folder, None, stop=stop)
        last.to_its_end(None, started, leave=leave)


class TrainingRun:
    """One rank's training run: the functions that the trainer calls, and the report and checkpoints that it writes."""

    def __init__(
        self,
        job: Assembly,
        data: TaskData,
        run_folder: RunFolder,
        saved: checkpoint.Saved | None,
        *,
        stop: process.StopRequest,
    ) -> None:
        self.job = job
        self._stop = stop
        self._saved = saved
        self._data = data
        self.run_folder = run_folder
        self._draws = job.draws(data)
        self.loader = job.training_loader(self._draws)
        self._tracing = Tracing(
            job.spec.report.trace,
            job.session,
            job.optimizer.groups,
            lambda: job.session.state(job.model, job.optimizer),
            accumulate=job.recipe.accumulate,
            readers=None if job.recipe.mesh is None else job.recipe.mesh.readers,
        )
        self.loader = self._tracing.watch(self.loader, decided=job.decided)
        self.updates = total_updates(job.spec, self.loader.updates_per_epoch)
        self._result = result = Results.of(saved)
        self.report = reporter(job, run_folder, result.progress)
        self.records = TrainingRecords(job.spec, run_folder, job.session, self.report, saved)
        self._inspection = Inspection(job, self.report, total_updates=self.updates)
        self._profile = Profile(job.session, job.spec.report.profile, run_folder)
        peak = peak_of(job.spec, precision=job.recipe.precision, device=job.session.device)
        frozen = job.spec.train.freeze
        self._utilisation = Utilisation(job.session, job.plugin, job.task, peak_tflops=peak, frozen=frozen)
        self._evaluations = job.evaluation_loader() if job.spec.evaluate.enabled else None

    def to_its_end(self, resumed_from: Path | None, started: float, *, leave: process.Leaving) -> None:
        """Train to the end, and write the records; ``started``: ``time.perf_counter()`` at the start of the job."""
        # Announced after the checkpoint was restored: the first record of a job that goes on takes the run folder over.
        self.announce(resumed_from=resumed_from)
        copying.catch_up(self.records.copies, self.run_folder)
        self._warn_of_other_teacher()
        self._restore_draws()
        try:
            run_loop(self.loop(), self.job.model)
        except Interrupted:
            self.end("interrupted", seconds=time.perf_counter() - started)
            raise
        except BaseException as error:
            # First, while this rank is still among the others: they notice only when the backend is left.
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

    def _samples(self) -> Mapping[str, Any]:
        return resumed_samples.facts(count=self.job.data.length("train"), digest=self._data.samples_digest())

    def check_continues(self, saved: checkpoint.Saved) -> None:
        """See ``resumed_samples.check_same`` and ``cadence.check_continues``."""
        body = {"spec": saved.spec, "extra": saved.meta["extra"]}
        resumed_samples.check_same(self._samples(), body, spec=self.job.spec, progress=saved.progress)
        cadence.check_continues(
            self.progress,
            updates_per_epoch=self.loader.updates_per_epoch,
            global_batch=self.job.spec.train.batch_size,
        )

    def loop(self) -> Loop:
        """Make the training loop with everything that it calls."""
        job, spec = self.job, self.job.spec
        schedule = Schedule(spec, updates_per_epoch=self.loader.updates_per_epoch, total_updates=self.updates)
        feed = LoaderFeed(
            session=job.session,
            loader=self.loader,
            global_batch=spec.train.batch_size,
            arranged=job.plugin.arranged,
        )
        return Loop(
            Job(
                session=job.session,
                steppers=[Stepper(job.optimizer, schedule, count=self.progress.update)],
                feed=feed,
                total_updates=self.updates,
                shares=job.shares,
                seed=spec.train.seed if job.plugin.native else None,
                # A trace looks at the state after every update, which must be that of the record.
                late=job.session.capabilities.late and spec.report.trace == "none",
                sums_metrics=True,
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
                on_update=self.report_update,
                evaluate=self.evaluate,
                inspect=self._show_update,
                close=self._profile.close,
                save=self.save,
                stop=self._is_asked_to_end,
                save_requested=self._stop.save,
            ),
            self.progress,
        )

    def _show_update(self, progress: Progress) -> None:
        """Show an update to reporters, outside of a profile."""
        self._inspection(progress)
        self._profile(progress)

    def _is_asked_to_end(self) -> bool:
        """Return whether this rank was asked to end. Also notices a failed background save before the next save does.

        Raises:
            TrainingError: A background save has failed.
        """
        self.records.check()
        return self._stop()

    def announce(self, *, resumed_from: Path | None) -> None:
        """Write the first record of the report, which says what is about to be trained; every rank must call."""
        job = self.job
        fields = {
            "total_updates": self.updates,
            "updates_per_epoch": self.loader.updates_per_epoch,
            "precision": job.recipe.precision,
            "model": job.spec.model.name,
            "classes": list(job.task.class_names),
            "train_samples": job.data.length("train"),
            "val_samples": job.data.length("val"),
            "trained_arrays": sum(len(group) for group in job.optimizer.groups),
            "details": dict(job.task.details),
            **self._tracing.start(),
        }
        self.records.start(job.backend, resume=resumed_from, fields=fields)
        report_weights(self.report, job)
        self.records.report_changes(job.spec, shards=self._shards)

    def _warn_of_other_teacher(self) -> None:
        """Warn if the resumed checkpoint was trained with another teacher than this job's."""
        before = self.job.teacher if self._saved is None else self._saved.meta["extra"].get("teacher")
        if before != self.job.teacher:
            what = "none" if before is None else "other weights"
            message = (
                f"train.distil: the checkpoint was trained with {what} as its teacher; the job goes on with this spec's"
            )
            self.report.event("warning", message=message)

    @property
    def _shards(self) -> int:
        """Number of parts of an update."""
        return self.job.shares.rounds * self.job.shares.shards

    def _restore_draws(self) -> None:
        """Go on drawing samples as the resumed job did; warn if it chose them in another way."""
        before = None if self._saved is None else self._saved.meta["extra"].get(KEY)
        if self._draws is not None and before is not None:
            self._draws.restore(before)
        elif self._saved is not None and (self._draws is None) != (before is None):
            message = (
                f"the checkpoint was trained on samples {'drawn by weights' if before else 'of which each came once an epoch'}; "
                "from here on, this job's spec chooses them in the other way"
            )
            self.report.event("warning", message=message)

    def report_update(self, record: Mapping[str, Any]) -> None:
        """Report the record of one update, with a warning if the update was skipped."""
        unit = in_unit(record, self._data.unit()) or ({"unit": "samples"} if self.job.plugin.native else {})
        self.records.report_update(
            {**record, **unit, **self._utilisation.of(record), **self._tracing.fields_of(record)}
        )

    def evaluate(self, progress: Progress) -> Mapping[str, float]:
        """Score the averaged weights; every rank must call."""
        job, began = self.job, time.perf_counter()
        assert self._evaluations is not None, "nothing is evaluated where that is not enabled"
        evaluator = job.data.evaluator()
        metrics = job.evaluate(self._evaluations, evaluator, stop=self._is_asked_to_end)
        if not metrics:
            message = f"update {progress.update}: not scored: {'; '.join(evaluator.remarks())}"
            self.report.event("warning", message=message)
            return metrics
        metrics["score"] = _score(metrics, job.spec.evaluate.score)
        best = self._result.take(metrics, progress, evaluator)
        self._result.evaluator = evaluator
        if self._draws is not None:
            self._draws.take_metrics(metrics)
        self.report.evaluation(
            metrics,
            update=progress.update,
            epoch=progress.epoch,
            headline=list(evaluator.headline),
            best=best,
            seconds=time.perf_counter() - began,
            **({"images": self._draw()} if self.report.wants_images else {}),
        )
        return metrics

    def save(self, progress: Progress, score: float | None, why: Why) -> None:
        """Write a checkpoint in the background; every rank must call."""
        job = self.job
        if why == "requested":
            self._stop.save.mark_served()
        stream = self.records.stream(("", job.model, job.optimizer))
        self._result.progress = progress
        extra = {
            **self._data.labels(),
            "details": dict(job.task.details),
            "results": self._result.metrics(),
            resumed_samples.KEY: self._samples(),
            **({} if job.teacher is None else {"teacher": job.teacher}),
            **({} if self._draws is None else {KEY: self._draws.state()}),
            **({RANDOM_SHARDS: self._shards} if job.plugin.native else {}),
        }
        content = {"spec": without_places(job.spec.model_dump(mode="json")), "extra": extra}
        self.records.save(stream, progress, score=score, why=why, content=content)

    def end(self, reason: str, *, seconds: float) -> None:
        """Wait for unfinished saves, and write the last record and the summary.

        Every rank must call, unless ``reason`` is "failed". A job that ends early because of ``train.patience`` is
        "done" too; its ``stopped_by`` is "patience".
        """
        self.records.settle(reason, stop=self._is_asked_to_end)
        # A job that was asked to end has seconds: its records come first, and its loaders last.
        if reason != "interrupted":
            self._close_loaders()
        result, job = self._result, self.job
        not_done = self._not_done(result.progress)
        summary: dict[str, Any] = {
            **self.records.summary(reason, result.progress, total_updates=self.updates, not_done=not_done),
            "stopped_by": "patience" if reason == "done" and result.progress.update < self.updates else None,
            "patience": job.spec.train.patience,
            "save_wait_seconds": round(self.records.checkpoints.waited_s, 3),
            "seconds": round(seconds, 2),
            "best": result.best,
            "last": result.last,
            "headline": result.headline,
            "remarks": result.remarks,
        }
        images = {}
        if reason == "done":
            summary |= self.records.result(("", job.model, job.optimizer))
            summary["measured"] = self._tracing.measure_ranks()
            images = {"images": self._draw()}
            self._keep()
        self.records.end(reason, summary, **images)
        if reason == "interrupted":
            self._close_loaders()

    def _not_done(self, progress: Progress) -> list[str]:
        """Return what a job that ends now has not done yet."""
        due = cadence.evaluations(self.job.spec.evaluate).due(progress) and progress.scored_update != progress.update
        images = [RESULTS, IMAGES] if self.job.spec.report.plots else []
        return [*(["evaluation"] if due else []), *images]

    def _close_loaders(self) -> None:
        self.loader.close()
        if self._evaluations is not None:
            self._evaluations.close()

    def _draw(self) -> list[str]:
        """Draw predictions of the last evaluation; return the names of the files, none if there is nothing to draw."""
        evaluator = self._last_evaluator()
        return [] if evaluator is None else kept.draw(self._data, evaluator, self.run_folder.path, self.report)

    def _keep(self) -> None:
        """Keep what pages show beside records and predictions."""
        if (evaluator := self._last_evaluator()) is not None:
            kept.keep(self._data, evaluator, self.run_folder.path, last=self._result.last, report=self.report)

    def _last_evaluator(self) -> Evaluator | None:
        """Return the evaluator of the last evaluation, if this rank keeps images of it."""
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
    """Names of the most important metrics."""
    remarks: list[str] = field(default_factory=list)
    """Remarks about the best evaluation."""
    evaluator: Evaluator | None = None
    """The evaluator of the last evaluation, with its predictions."""

    @classmethod
    def of(cls, saved: checkpoint.Saved | None) -> "Results":
        """Make the results at the start of a job: empty, or those of the checkpoint that it resumes."""
        if saved is None:
            return cls(progress=Progress())
        metrics = saved.meta["extra"].get("results", {})
        return cls(progress=saved.progress, best_score=saved.progress.best, **metrics)

    def metrics(self) -> dict[str, Any]:
        """Return the results that a checkpoint stores."""
        return {
            "best": dict(self.best),
            "last": dict(self.last),
            "headline": list(self.headline),
            "remarks": list(self.remarks),
        }

    def take(self, metrics: Mapping[str, float], progress: Progress, evaluator: Evaluator) -> bool:
        """Store the metrics of an evaluation; return whether they are the best so far."""
        self.last = {"update": progress.update, "epoch": progress.epoch, **metrics}
        self.headline = list(evaluator.headline)
        best = metrics["score"] > self.best_score
        if best:
            self.best_score, self.best, self.remarks = metrics["score"], self.last, evaluator.remarks()
        return best


def in_unit(record: Mapping[str, Any], unit: tuple[str, int] | None) -> dict[str, Any]:
    """Return the speed in ``record`` in the unit of a task, as ``<unit>_per_second``; nothing where it counts samples."""
    if unit is None:
        return {}
    word, per_sample = unit
    return {"unit": word, f"{word}_per_second": record["samples_per_second"] * per_sample}


def _score(metrics: Mapping[str, float], name: str | None) -> float:
    """Return the metric to maximise: ``evaluate.score`` if set, else the evaluator's own score.

    Raises:
        SpecError: There is no such metric, for example because its class does not occur in the data.
    """
    if name is not None and name not in metrics:
        raise SpecError(f"evaluate.score: {name!r} given, this evaluation has {', '.join(metrics)}")
    return metrics[name or "score"]
