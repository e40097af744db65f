"""The training loop. It knows a backend, a loader and a schedule; what else happens is handed in as plain callables."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mtrain.core.cadence import Cadence, advanced, scored
from mtrain.core.interfaces import Backend, Batch, Loader, Module, Optimizer, Progress, Rates
from mtrain.errors import Interrupted, NonFiniteError

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and for how long."""

    backend: Backend
    model: Module
    optimizer: Optimizer
    loader: Loader
    schedule: Callable[[int], Rates]
    total_updates: int
    accumulate: int
    """Micro batches per update."""
    global_batch: int
    """Samples per update over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Cadences:
    """When something other than an update happens."""

    report_every: int = 1
    """One record per this many updates."""
    evaluations: Cadence = field(default_factory=Cadence)
    saves: Cadence = field(default_factory=Cadence)
    evaluate_at_end: bool = True
    patience: int | None = None
    """End after this many evaluations without a better score."""
    max_nonfinite: int = 20
    """Updates in a row that may be skipped because their gradient was not finite."""


def _no_scores(progress: Progress) -> Mapping[str, float]:
    return {}


def _nothing(*values: object) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What the trainer calls. ``evaluate`` and ``save`` are collective: all ranks run them together."""

    on_update: Callable[[Record], None] = _nothing
    """Takes a record: see ``Trainer.run_update``."""
    evaluate: Callable[[Progress], Mapping[str, float]] = _no_scores
    """Figures, equal on every rank; ``"score"`` is the one to maximise. Raises ``Interrupted``, on every rank, when a
    request to end was agreed on meanwhile."""
    save: Callable[[Progress, float | None], None] = _nothing
    """Takes where to go on from, and the score if it was evaluated just now."""
    stop: Callable[[], bool] = lambda: False
    """Whether this rank was asked to end; one rank is enough."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds."""


@dataclass(kw_only=True, slots=True)
class _Turn:
    """What one update has measured so far."""

    started: float
    waited: float = 0.0
    losses: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Runs a job from any update to its end; one update is one turn of the loop, the same for every backend.

    Raises (from ``run``):
        NonFiniteError: too many updates in a row were not finite.
        Interrupted: ``hooks.stop`` said so on some rank; the state is saved.
    """

    def __init__(self, job: Job, cadences: Cadences, hooks: Hooks) -> None:
        self.job = job
        self.cadences = cadences
        self.hooks = hooks
        self._saved_at = hooks.clock()
        self._saved_update = -1

    def run(self, progress: Progress) -> Progress:
        """Train from ``progress`` to the end; returns where it ended. Every rank calls."""
        self.job.model.train()
        self._saved_update = progress.update or -1
        unscored = progress.update > 0 and progress.scored_update != progress.update
        if unscored and self.cadences.evaluations.due(progress):  # a request to end came in front of it
            progress = self._after_update(progress, evaluate=True, save=False)
        while progress.update < self.job.total_updates and not self._out_of_patience(progress):
            progress = self.run_epoch(progress)
        if self.cadences.evaluate_at_end and progress.scored_update != progress.update:
            progress = self._after_update(progress, evaluate=True, save=True)
        if self._saved_update != progress.update:
            self._save(progress, None)
        return progress

    def run_epoch(self, progress: Progress) -> Progress:
        """The rest of the epoch that ``progress`` is in, or of the job."""
        job, epoch = self.job, progress.epoch
        micro_batches = job.loader.micro_batches(epoch, progress.position)
        with closing(_Closable(job.backend.batches(micro_batches))) as batches:
            while progress.epoch == epoch and progress.update < job.total_updates:
                progress, stop, save = self.run_update(batches, progress)
                progress = self._after_update(
                    progress,
                    evaluate=self.cadences.evaluations.due(progress),
                    save=save or self.cadences.saves.due(progress),
                    stop=stop,
                )
                if self._out_of_patience(progress):
                    break
        return progress

    def run_update(self, batches: Iterator[Batch], progress: Progress) -> tuple[Progress, bool, bool]:
        """One update. Returns where the job stands then, and what the ranks agreed on: (end now, save now).

        Every ``report_every`` updates ``on_update`` takes a record of: update, epoch, position, updates_per_epoch,
        total_updates, losses (mean over the global batch), rate (of the last group), rates, momentum (None: as the
        groups say), norm (before clipping), skipped (updates of the job whose gradient was
        not finite: such an update is always reported), samples_per_s, wait_share (of the time, waiting for data),
        seconds, memory_bytes (of this rank), and what else the backend measures.
        """
        job, clock = self.job, self.hooks.clock
        turn = _Turn(started=clock())
        for i in range(job.accumulate):
            batch = self._next(batches, turn)
            with job.optimizer.micro_batch(last=i == job.accumulate - 1):
                losses = job.model(batch)
                job.optimizer.backward(losses["total"])
            turn.losses = {name: turn.losses.get(name, 0.0) + x.detach() for name, x in losses.items()}
        rates = job.schedule(progress.update)
        norm = job.optimizer.step(rates)
        after = advanced(
            progress,
            updates_per_epoch=job.loader.updates_per_epoch,
            samples=job.global_batch,
            finite=math.isfinite(norm),
        )
        self._check_finite(after, progress)
        return after, *self._agree(turn, progress, rates, norm)

    def _next(self, batches: Iterator[Batch], turn: _Turn) -> Batch:
        before = self.hooks.clock()
        batch = next(batches)
        turn.waited += self.hooks.clock() - before
        return batch

    def _check_finite(self, after: Progress, progress: Progress) -> None:
        if after.skipped_in_a_row >= self.cadences.max_nonfinite:
            raise NonFiniteError(
                f"the gradient was not finite in {after.skipped_in_a_row} updates in a row, the last is update "
                f"{progress.update} of epoch {progress.epoch}; lower optimizer.rate, lengthen schedule.warmup, check "
                "the data, or use precision bf16 instead of fp16"
            )

    def _agree(self, turn: _Turn, progress: Progress, rates: Rates, norm: float) -> tuple[bool, bool]:
        """Exchange one small vector: whether to end or save, and the figures of the record."""
        clock, collective = self.hooks.clock, self.job.backend.collective
        reported = progress.update % self.cadences.report_every == 0 or not math.isfinite(norm)
        overdue = self.cadences.saves.overdue(clock() - self._saved_at)
        figures = [float(self.hooks.stop()), float(overdue and collective.rank == 0)]
        if reported:
            figures += [float(x) / self.job.accumulate for x in turn.losses.values()]
            figures.append(turn.waited)
        agreed = collective.all_reduce(np.array(figures), "mean")
        if reported:
            self._report(turn, progress, rates, norm=norm, means=[float(x) for x in agreed[2:]])
        return bool(agreed[0] > 0), bool(agreed[1] > 0)

    def _report(self, turn: _Turn, progress: Progress, rates: Rates, *, norm: float, means: list[float]) -> None:
        seconds = max(self.hooks.clock() - turn.started, 1e-9)
        measured = self.job.backend.measure()
        where = {"update": progress.update, "epoch": progress.epoch, "position": progress.position}
        self.hooks.on_update(
            {
                **where,
                "updates_per_epoch": self.job.loader.updates_per_epoch,
                "total_updates": self.job.total_updates,
                "losses": dict(zip(turn.losses, means[:-1], strict=True)),
                "rate": rates.rates[-1],
                "rates": list(rates.rates),
                "momentum": rates.momentum,
                "norm": norm,
                "skipped": progress.skipped + (not math.isfinite(norm)),
                "samples_per_s": self.job.global_batch / seconds,
                "wait_share": min(means[-1] / seconds, 1.0),
                "seconds": seconds,
                **measured,
                "memory_bytes": int(measured["memory_bytes"]),
            }
        )

    def _after_update(self, progress: Progress, *, evaluate: bool, save: bool, stop: bool = False) -> Progress:
        """Evaluate and save where due; end where asked, saved."""
        score = None
        if evaluate and not stop:
            try:
                progress, score = self._evaluate(progress)
            except Interrupted:  # evaluated when the job goes on
                stop = True
        gained = score is not None and progress.epochs_without_gain == 0
        if stop or save or gained:
            self._save(progress, score)
        if stop:
            raise Interrupted(f"ended from outside at update {progress.update}, state saved; go on with --resume")
        return progress

    def _evaluate(self, progress: Progress) -> tuple[Progress, float | None]:
        scores = self.hooks.evaluate(progress)
        if "score" not in scores:
            return replace(progress, scored_update=progress.update), None
        return scored(progress, scores["score"]), scores["score"]

    def _save(self, progress: Progress, score: float | None) -> None:
        self.hooks.save(replace(progress), score)
        self._saved_update = progress.update
        self._saved_at = self.hooks.clock()

    def _out_of_patience(self, progress: Progress) -> bool:
        patience = self.cadences.patience
        return patience is not None and progress.epochs_without_gain >= patience


class _Closable(Iterator[Batch]):
    """An iterator that can be closed, whether or not the one inside can."""

    def __init__(self, inside: Iterator[Batch]) -> None:
        self._inside = inside

    def __next__(self) -> Batch:
        return next(self._inside)

    def close(self) -> None:
        getattr(self._inside, "close", lambda: None)()
