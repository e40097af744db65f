"""The training loop. It uses a session, a loader and a schedule; reporting, evaluating and saving are callables.

The callables are passed in as ``Hooks``, so that the loop depends on none of the modules that provide them.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mtrain.core.cadence import Cadence, advanced, counted, moved, scored
from mtrain.core.interfaces import Array, Batch, HostBatch, Loader, Module, Optimizer, Progress, RankSession, Rates, Why
from mtrain.core.sampler import Shares
from mtrain.core.update_record import FinishedUpdate, UpdateRecord, check_finite
from mtrain.errors import Interrupted


def _unchanged(batch: HostBatch) -> HostBatch:
    return batch


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model to train, what it is trained with, and for how many updates."""

    session: RankSession
    model: Module
    optimizer: Optimizer
    loader: Loader
    schedule: Callable[[int], Rates]
    total_updates: int
    accumulate: int
    """Micro batches per update."""
    global_batch: int
    """Samples per update over all ranks."""
    shares: Shares | None = None
    """Which shards this rank computes; None: one in each forward pass, as many as ranks."""
    seeds_shards: bool = False
    """Whether the model's randomness is seeded before each micro batch, because reading samples in this process may
    have drawn from the same generators."""
    arranged: Callable[[HostBatch], HostBatch] = _unchanged
    """Arranges a micro batch for the network before it is sent to the device, see ``Model.arranged``."""
    late: bool = False
    """Whether the figures of an update are read after the next one was started, see ``RankSession.late``. Requests to end or
    to save are then followed one update later, and so is the refusal of too many updates that are not finite."""


@dataclass(frozen=True, kw_only=True)
class Cadences:
    """How often the loop reports, evaluates and saves, and when it gives up."""

    report_every: int = 1
    """Updates per record that is reported."""
    evaluations: Cadence = field(default_factory=Cadence)
    saves: Cadence = field(default_factory=Cadence)
    evaluate_at_end: bool = True
    patience: int | None = None
    """End after this many evaluations without a better score."""
    max_nonfinite: int = 20
    """Updates in a row that may be skipped because their gradient was not finite."""


OVERDUE, REQUESTED = 1.0, 2.0
"""What a rank adds to the sum by which the ranks agree to save. One rank alone counts the minutes, so a sum of at least
``REQUESTED`` holds a request."""


def _why(total: float) -> Why | None:
    """Return why to save, from the sum over all ranks; it comes from a mean and is not exact."""
    return "requested" if total > (OVERDUE + REQUESTED) / 2 else "due" if total > 0 else None


def _no_scores(progress: Progress) -> Mapping[str, float]:
    return {}


def _nothing(*values: object) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The callables that the trainer uses. ``evaluate`` and ``save`` are collective: all ranks run them together."""

    on_update: Callable[[UpdateRecord], None] = _nothing
    """Receives the record of an update, see ``FinishedUpdate.record``."""
    evaluate: Callable[[Progress], Mapping[str, float]] = _no_scores
    """Returns figures that are equal on every rank; ``"score"`` is the one to maximise. Raises ``Interrupted``, on
    every rank, if the ranks agreed during the evaluation to end the job."""
    inspect: Callable[[Progress], None] = _nothing
    """Receives the progress before the first update and after each one; collective too. It must change nothing."""
    save: Callable[[Progress, float | None, Why], None] = _nothing
    """Saves the job so that it can be resumed at the given progress, for the reason given. The score is None unless the
    job was evaluated just now."""
    stop: Callable[[], bool] = lambda: False
    """Returns whether this rank has been asked to end. If one rank has, all of them end."""
    save_requested: Callable[[], bool] = lambda: False
    """Returns whether this rank has been asked to save and to go on. If one rank has, all of them save."""
    clock: Callable[[], float] = time.perf_counter
    """Returns a time in seconds."""


@dataclass(kw_only=True, slots=True)
class _UpdateMeasures:
    """Times in seconds and losses measured during one update."""

    start_s: float
    data_wait_s: float = 0.0
    losses: dict[str, Any] = field(default_factory=dict)
    """Sum of each loss over the micro batches so far."""

    def add(self, losses: Mapping[str, Any], *, weight: float) -> None:
        """Add the losses of a micro batch, times ``weight``."""
        for name, loss in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + (loss.detach() if weight == 1 else loss.detach() * weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unread:
    """An update that was started, and of which nothing is known yet."""

    before: Progress
    measures: _UpdateMeasures
    rates: Rates
    read: Callable[[], tuple[float, Array]]


class Trainer:
    """Runs a job from any update to its end. The loop is the same for every backend.

    Raises (from ``run``):
        NonFiniteError: the gradient was not finite in too many updates in a row.
        Interrupted: ``hooks.stop`` returned True on some rank; the state is saved.
    """

    def __init__(self, job: Job, cadences: Cadences, hooks: Hooks) -> None:
        self.job = job
        self.cadences = cadences
        self.hooks = hooks
        collective = job.session.collective
        self._shares = job.shares or Shares(
            rank=collective.rank, size=collective.size, shards=collective.size, rounds=job.accumulate
        )
        self._saved_at = hooks.clock()
        self._saved_update = -1
        self._unread: _Unread | None = None
        self._read_at = -math.inf

    def run(self, progress: Progress) -> Progress:
        """Train from ``progress`` to the end of the job, and return the progress then. Every rank must call."""
        self.job.model.train()
        self._saved_update = progress.update or -1
        self.hooks.inspect(progress)
        unscored = progress.update > 0 and progress.scored_update != progress.update
        if unscored and self.cadences.evaluations.due(progress):
            # The interrupted run was asked to end before an evaluation that was due, so it is made up for now.
            progress = self._after_update(progress, evaluate=True, save=None)
        while progress.update < self.job.total_updates and not self._out_of_patience(progress):
            progress = self.run_epoch(progress)
        if self.cadences.evaluate_at_end and progress.scored_update != progress.update:
            progress = self._after_update(progress, evaluate=True, save="due")
        if self._saved_update != progress.update:
            self._save(progress, None, "due")
        return progress

    def run_epoch(self, progress: Progress) -> Progress:
        """Train to the end of the epoch that ``progress`` is in, or of the job if that comes first."""
        job, epoch = self.job, progress.epoch
        micro_batches = job.loader.micro_batches(epoch, progress.position)
        with closing(closable(job.session.batches(map(job.arranged, micro_batches)))) as batches:
            while progress.epoch == epoch and progress.update < job.total_updates:
                progress, stop, why = self.run_update(batches, progress)
                evaluate, save = self.cadences.evaluations.due(progress), self.cadences.saves.due(progress)
                if stop or why or evaluate or save or progress.update >= job.total_updates:
                    progress, stop, why = self._all_read(progress, stop, why)
                self.hooks.inspect(progress)
                progress = self._after_update(
                    progress, evaluate=evaluate, save=why or ("due" if save else None), stop=stop
                )
                if self._out_of_patience(progress):
                    break
        return progress

    def run_update(self, batches: Iterator[Batch], progress: Progress) -> tuple[Progress, bool, Why | None]:
        """Run one update. Return the progress after it and what all ranks have agreed on: (end now, why to save now).

        Every ``report_every`` updates, and for every update that was skipped, ``on_update`` receives its
        record. Where the job is late, the record and what was agreed on are those of the update before.
        """
        job, clock = self.job, self.hooks.clock
        measures = _UpdateMeasures(start_s=clock())
        for i in range(job.accumulate):
            batch = self._next(batches, measures)
            weight = self._shares.weight(i)
            if job.seeds_shards:
                job.optimizer.seed_shard(self._shares.shard(i))
            kept = {} if self._shares.moves_buffers(i) else {"moves_buffers": False}
            with job.optimizer.micro_batch(last=i == job.accumulate - 1, **kept):
                losses = job.model(batch)
                job.optimizer.backward(losses["total"] if weight == 1 else losses["total"] * weight)
            measures.add(losses, weight=weight)
        rates = job.schedule(progress.update)
        if job.late:
            return self._run_late(measures, progress, rates)
        norm = job.optimizer.step(rates)
        after = advanced(
            progress,
            updates_per_epoch=job.loader.updates_per_epoch,
            samples=job.global_batch,
            finite=math.isfinite(norm),
        )
        check_finite(progress, after, max_nonfinite=self.cadences.max_nonfinite)
        return after, *self._agree(measures, progress, rates, norm)

    def _run_late(
        self, measures: _UpdateMeasures, progress: Progress, rates: Rates
    ) -> tuple[Progress, bool, Why | None]:
        """Start the update of a late job, and return the progress after it and what the update before brought."""
        job, former = self.job, self._unread
        losses = [x / job.accumulate for x in measures.losses.values()]
        read = job.optimizer.step_later(rates, [*self._requests(), measures.data_wait_s], losses)
        self._unread = _Unread(before=progress, measures=measures, rates=rates, read=read)
        after = moved(progress, updates_per_epoch=job.loader.updates_per_epoch, samples=job.global_batch)
        return (after, False, None) if former is None else self._read(former, after)

    def _all_read(self, progress: Progress, stop: bool, why: Why | None) -> tuple[Progress, bool, Why | None]:  # noqa: FBT001
        """Return progress and requests with those of the last update, where its figures were not read yet."""
        last, self._unread = self._unread, None
        if last is None:
            return progress, stop, why
        progress, last_stop, last_why = self._read(last, progress)
        return progress, stop or last_stop, "requested" if "requested" in (why, last_why) else why or last_why

    def _read(self, unread: _Unread, progress: Progress) -> tuple[Progress, bool, Why | None]:
        """Read the figures of an update, report it, and count it in ``progress``."""
        norm, figures = unread.read()
        finite = math.isfinite(norm)
        before = replace(unread.before, skipped=progress.skipped, skipped_in_a_row=progress.skipped_in_a_row)
        progress = counted(progress, finite=finite)
        now = self.hooks.clock()
        # The time between two readings: an update is started before the former one has been computed.
        measures = replace(unread.measures, start_s=max(unread.measures.start_s, self._read_at))
        self._read_at = now
        check_finite(before, progress, max_nonfinite=self.cadences.max_nonfinite)
        if before.update % self.cadences.report_every == 0 or not finite:
            means = [float(x) for x in (*figures[3:], figures[2])]
            self._report(measures, before, unread.rates, norm=norm, means=means)
        return progress, bool(figures[0] > 0), _why(figures[1] * self.job.session.collective.size)

    def _next(self, batches: Iterator[Batch], measures: _UpdateMeasures) -> Batch:
        before = self.hooks.clock()
        batch = next(batches)
        measures.data_wait_s += self.hooks.clock() - before
        return batch

    def _agree(
        self, measures: _UpdateMeasures, progress: Progress, rates: Rates, norm: float
    ) -> tuple[bool, Why | None]:
        """Exchange one small vector between ranks: the requests to end or to save, and the figures of the record.

        Return (end now, why to save now), equal on every rank.
        """
        collective = self.job.session.collective
        reported = progress.update % self.cadences.report_every == 0 or not math.isfinite(norm)
        figures = self._requests()
        if reported:
            figures += [float(x) / self.job.accumulate for x in measures.losses.values()]
            figures.append(measures.data_wait_s)
        agreed = collective.all_reduce(np.array(figures), "mean")
        if reported:
            self._report(measures, progress, rates, norm=norm, means=[float(x) for x in agreed[2:]])
        return bool(agreed[0] > 0), _why(agreed[1] * collective.size)

    def _requests(self) -> list[float]:
        """Return this rank's requests to end and to save, as numbers to add up over the ranks."""
        overdue = self.cadences.saves.overdue(self.hooks.clock() - self._saved_at)
        by_clock = OVERDUE * (overdue and self.job.session.collective.rank == 0)
        return [float(self.hooks.stop()), REQUESTED if self.hooks.save_requested() else by_clock]

    def _report(
        self, measures: _UpdateMeasures, progress: Progress, rates: Rates, *, norm: float, means: list[float]
    ) -> None:
        """Pass a record to ``on_update``.

        ``means`` holds the mean over ranks of each loss and, at the end, of the seconds spent waiting for data.
        """
        update = FinishedUpdate(
            before=progress,
            updates_per_epoch=self.job.loader.updates_per_epoch,
            total_updates=self.job.total_updates,
            global_batch=self.job.global_batch,
            losses=dict(zip(measures.losses, means[:-1], strict=True)),
            rates=rates,
            norm=norm,
            seconds=self.hooks.clock() - measures.start_s,
            waited_s=means[-1],
        )
        self.hooks.on_update(update.record(self.job.session))

    def _after_update(self, progress: Progress, *, evaluate: bool, save: Why | None, stop: bool = False) -> Progress:
        """Evaluate and save as requested. With ``stop``, save and raise ``Interrupted``."""
        score = None
        if save == "requested" and evaluate and not stop:  # Whoever asks may have less time than an evaluation takes.
            self._save(progress, None, save)
            save = "due" if self.cadences.saves.due(progress) else None
        if evaluate and not stop:
            try:
                progress, score = self._evaluate(progress)
            except Interrupted:  # The job is saved first, and evaluates here when it is resumed.
                stop = True
        gained = score is not None and progress.epochs_without_gain == 0
        if stop or save or gained:
            self._save(progress, score, "ending" if stop else save or "best")
        if stop:
            raise Interrupted(f"ended from outside at update {progress.update}, state saved; go on with --resume")
        return progress

    def _evaluate(self, progress: Progress) -> tuple[Progress, float | None]:
        scores = self.hooks.evaluate(progress)
        if "score" not in scores:
            return replace(progress, scored_update=progress.update), None
        return scored(progress, scores["score"]), scores["score"]

    def _save(self, progress: Progress, score: float | None, why: Why) -> None:
        self.hooks.save(replace(progress), score, why)
        self._saved_update = progress.update
        self._saved_at = self.hooks.clock()

    def _out_of_patience(self, progress: Progress) -> bool:
        patience = self.cadences.patience
        return patience is not None and progress.epochs_without_gain >= patience


def closable(items: Iterator[Batch]) -> Generator[Batch, None, None]:
    """Yield the items, and close their iterator when this one is closed, if it can be closed.

    Sessions of other projects may return iterators without ``close``, which ``contextlib.closing`` requires.
    """
    yield from items
