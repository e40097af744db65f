"""The training loop: a generator of micro batches that counts, agrees with the other ranks, reports, evaluates and saves.

Two drivers take its micro batches: ``core.update.trainer`` for the job of a spec, and the user's script for ``mtrain.session``. For
each micro batch they call the model and give its loss to ``Loop.use``. An update is finished when the next micro batch is
asked for, so that a script may evaluate after it.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from mtrain.core.interfaces import Batch, Progress, RankSession, Rates, Why
from mtrain.core.network.noise import shard_seed
from mtrain.core.ranks.agreement import HEAD, NO_REQUESTS, Agreement, RankPlace, Requests, head
from mtrain.core.samples.feed import Feed, closable
from mtrain.core.samples.sampler import Shares
from mtrain.core.samples.seeds import seed_host
from mtrain.core.update.cadence import Cadences, count_score, count_update, move_on
from mtrain.core.update.measures import Measures
from mtrain.core.update.record import FinishedUpdate, UpdateRecord, check_finite
from mtrain.core.update.stepping import MicroBatch, ReadLate, Stepper, Use, all_rates, by_model
from mtrain.errors import Interrupted

Weights: TypeAlias = tuple[float, float]
"""The factor of a loss, and by what the mean over micro batches and ranks is divided once the update's last one is known."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, on which data, and for how many updates."""

    session: RankSession
    steppers: Sequence[Stepper]
    """The optimizers, one per model; each takes the loss of every micro batch."""
    feed: Feed
    total_updates: int
    shares: Shares
    """Which shards of an update this rank computes."""
    seed: int | None = None
    """Seed of the job, with which the generators of framework, numpy and Python are seeded before each micro batch: reading samples
    in this process may have drawn from them; None: they are not."""
    draws_alike: bool = False
    """Whether numpy and Python draw the same on every rank, as a script needs that makes the same batch on each."""
    late: bool = False
    """Whether the metrics of an update are read after the next one was started, see ``Capabilities.late``. Requests to end or
    to save are then followed one update later, and so is the refusal of too many updates that are not finite. For one
    optimizer, all of whose metrics are given with its loss."""
    sums_metrics: bool = False
    """Whether metrics are summed up over micro batches on the device, as late ones must be. Else each is read, and their mean
    is computed in float64, in the order of their names."""


def _no_scores(progress: Progress) -> Mapping[str, float]:
    return {}


def _nothing(*values: object) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The callables that the loop uses. ``evaluate`` and ``save`` are collective: all ranks run them together."""

    on_update: Callable[[UpdateRecord], None] = _nothing
    """Receives the record of an update, see ``FinishedUpdate.record``."""
    evaluate: Callable[[Progress], Mapping[str, float]] = _no_scores
    """Returns metrics that are equal on every rank; ``"score"`` is the one to maximise. Raises ``Interrupted``, on
    every rank, if the ranks agreed during the evaluation to end the job."""
    inspect: Callable[[Progress], None] = _nothing
    """Receives the progress before the first update and after each one; collective too. It must change nothing."""
    close: Callable[[], None] = _nothing
    """Is called when the loop ends, however it does; it may be called again."""
    save: Callable[[Progress, float | None, Why], None] = _nothing
    """Saves the job so that it can be resumed at the given progress, for the reason given. The score is None unless the
    job was evaluated just now."""
    stop: Callable[[], bool] = lambda: False
    """Returns whether this rank has been asked to end. If one rank has, all of them end."""
    save_requested: Callable[[], bool] = lambda: False
    """Returns whether this rank has been asked to save and to go on. If one rank has, all of them save."""
    clock: Callable[[], float] = time.perf_counter
    """Returns a time in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StartedUpdate:
    """An update that was started, and of which nothing is known yet."""

    before: Progress
    place: RankPlace
    measures: Measures
    rates: Rates
    read: ReadLate


class Loop(Iterator[MicroBatch]):
    """Runs a job from any update to its end, on one rank. The loop is the same for every backend.

    Raises (from iteration, ``leave`` and ``finish``):
        NonFiniteError: the gradient was not finite in too many updates in a row.
        RanksDisagree: the ranks are at different places after an update.
        Interrupted: ``hooks.stop`` returned True on some rank; the state is saved.
    """

    def __init__(self, job: Job, cadences: Cadences, hooks: Hooks, progress: Progress) -> None:
        self.job = job
        self.cadences = cadences
        self.hooks = hooks
        self.progress = progress
        self.micro: MicroBatch | None = None
        """The micro batch that the driver has in hands."""
        self.save_now = False
        """Whether this rank's driver wants a checkpoint after the update in hands."""
        self.score: float | None = None
        """Score of an evaluation by the driver, if it is the best so far; kept with the next checkpoint."""
        self.holds = False
        """Whether the job can be resumed at ``settle`` alone: checkpoints, and requests to end, wait for it."""
        self._held = NO_REQUESTS
        self._agreement = Agreement(job.session.collective)
        # Once: a session makes its capabilities anew whenever it is asked.
        self._seed_generators = None if job.seed is None else job.session.capabilities.seed
        self._measures = Measures(summed=job.sums_metrics)
        self._started: _StartedUpdate | None = None
        self._unread: _StartedUpdate | None = None
        self._read_at = -math.inf
        self._saved_at = hooks.clock()
        # A job that begins has saved nothing, so even one without updates writes its start.
        self._saved_update = progress.update or -1
        self._micro_batches = self._run()

    # ------------------------------------------------------------------------------------------------- the generator
    def _run(self) -> Generator[MicroBatch, None, None]:
        try:
            self.hooks.inspect(self.progress)
            # The run that is resumed may have been asked to end between an update and its evaluation.
            self._make_up_for_evaluation()
            while not self.is_complete:
                # Closed even if the driver leaves in mid-epoch: loader processes must not outlive the loop.
                with closing(closable(self.job.feed.open(self.progress))) as batches:
                    epoch = self.progress.epoch
                    while not self.is_complete and (self.progress.epoch == epoch or self.job.feed.spans_epochs):
                        for number in range(self.job.shares.passes):
                            yield self._begin(number, batches)
                        if self.micro is not None:  # else ``settle`` has finished it
                            self._finish_update()
        finally:
            self._end()

    def __next__(self) -> MicroBatch:
        """Return the next micro batch; every rank must ask for equally many."""
        return next(self._micro_batches)

    def close(self) -> None:
        """End the loop where it is, without the other ranks."""
        self._micro_batches.close()
        self._end()  # a generator that has not begun does nothing when it is closed

    def settle(self) -> None:
        """Finish the update in hands without beginning another one, and save as was asked for meanwhile. Every rank must call."""
        held, self.holds = self.holds, False
        try:
            if self.has_updated:
                self._finish_update()
        except BaseException:
            self.close()
            raise
        finally:
            self.holds = held

    def leave(self) -> None:
        """End the loop before its last update, after an update that has changed the weights. Every rank must call."""
        try:
            if self.has_updated:
                self._finish_update(leaves=self.progress.update + 1 < self.job.total_updates)
        finally:
            self.close()

    def finish(self) -> None:
        """Evaluate and save at the end of the job, where that was not done yet; every rank must call."""
        if self.cadences.evaluate_at_end and self.progress.scored_update != self.progress.update:
            self._after_update(evaluate=True, save="due")
        if self._saved_update != self.progress.update or self.score is not None or self.save_now:
            self._save(self.score, "due")

    def interrupt(self) -> None:
        """Save for the end of the job while a micro batch is in hands; every rank must call.

        An update that has changed the weights is finished. One that is incomplete is dropped, and made again on resume.
        """
        try:
            if self.has_updated:
                self._finish_update()
            self._drop_micro_batch()
            if self._saved_update != self.progress.update:
                self._save(self.score, "ending")
        finally:
            self.close()

    def _end(self) -> None:
        self._drop_micro_batch()
        self.job.feed.close()
        self.hooks.close()

    def _drop_micro_batch(self) -> None:
        self.micro = None
        self._leave_micro_batch()

    def _leave_micro_batch(self) -> None:
        for stepper in reversed(self.job.steppers):  # contexts of several models are inside one another
            stepper.close()

    @property
    def is_complete(self) -> bool:
        """Whether no update is left to make."""
        patience = self.cadences.patience
        out_of_patience = patience is not None and self.progress.epochs_without_gain >= patience
        return self.progress.update >= self.job.total_updates or out_of_patience

    # ------------------------------------------------------------------------------------------------- one update
    @property
    def has_updated(self) -> bool:
        """Whether an update has changed the weights that ``progress`` does not count yet."""
        steppers = self.job.steppers
        ended = any(stepper.done for stepper in steppers) and not any(stepper.pending for stepper in steppers)
        return self.micro is not None and self.micro.last and ended

    def _begin(self, number: int, batches: Iterator[Batch]) -> MicroBatch:
        """Wait for micro batch ``number`` of the update, and prepare the models for it."""
        clock, shares = self.hooks.clock, self.job.shares
        self._leave_micro_batch()
        if number == 0:
            self._measures = Measures(summed=self.job.sums_metrics, start_s=clock())
        before = clock()
        batch = next(batches)
        # Only the wait for the batch: what the models do before and after it is no waiting for data.
        self._measures.data_wait_s += clock() - before
        self.micro = micro = MicroBatch(
            batch=batch,
            number=number,
            last=number == shares.passes - 1,
            shard=shares.shard(number),
            weight=shares.weight(number) * self.job.feed.fill(self.progress, number),
            moves_buffers=shares.moves_buffers(number),
        )
        # After the batch has come: reading samples in this process may have drawn from the generators.
        if self.job.seed is not None and self._seed_generators is not None:
            seed = shard_seed(self.job.seed, micro.shard, self.progress.update)
            self._seed_generators(seed)
            seed_host(shard_seed(self.job.seed, 0, self.progress.update) if self.job.draws_alike else seed)
        for stepper in self.job.steppers:
            stepper.begin(micro)
        return micro

    def use(self, stepper: Stepper, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Use the loss of the micro batch in hands; with the last one of an update, the weights change.

        ``metrics``: numbers or tensors for the record of the update; of a late job, all of them.
        """
        self.backward(stepper, loss, metrics)
        assert self.micro is not None
        if self.micro.last and self.job.late:
            self._step_later(stepper)
        elif self.micro.last:
            stepper.step()

    def backward(
        self,
        stepper: Stepper,
        loss: Any,
        metrics: Mapping[str, Any],
        *,
        retain_graph: bool = False,
        weights: Weights | None = None,
    ) -> None:
        """Take a loss of the micro batch in hands; after the last one of an update, ``stepper`` must step or skip.

        ``weights``: the factor of the loss, and the divisor of the update; None: those of the shard's samples.
        """
        assert self.micro is not None, "there is no micro batch to use"
        is_further = stepper.used
        weight, divisor = weights or (self.micro.weight, 1.0)
        stepper.backward(loss, weight=weight, retain_graph=retain_graph, divisor=divisor)
        self._measure(metrics, (weight, divisor), is_further=is_further)

    def gradients_of(
        self, stepper: Stepper, loss: Any, metrics: Mapping[str, Any], *, retain_graph: bool, weight: float
    ) -> Mapping[str, Any]:
        """Take a loss as ``backward`` does, and return its own gradients, see ``Optimizer.gradients``."""
        assert self.micro is not None, "there is no micro batch to use"
        is_further = stepper.used
        own = stepper.gradients_of(loss, weight=weight, retain_graph=retain_graph)
        self._measure(metrics, (weight, 1.0), is_further=is_further)
        return own

    def _measure(self, metrics: Mapping[str, Any], weights: Weights, *, is_further: bool) -> None:
        weight, divisor = weights
        for name, value in metrics.items():
            self._measures.add(name, value, weight=weight, is_further=is_further)
            if divisor != 1:
                self._measures.divide(name, divisor)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the record of the update in hands, without waiting for the device."""
        assert self.micro is not None, "there is no micro batch to log for"
        for name, value in metrics.items():
            self._measures.add(name, value, weight=self.micro.weight)

    def _step_later(self, stepper: Stepper) -> None:
        """Start an update, and send what the other ranks must know of it together with its metrics."""
        measures = self._measures
        place = RankPlace(update=self.progress.update, names=measures.names)
        numbers = [*head(self._requests(), place), measures.data_wait_s]
        read = stepper.step_later(numbers, measures.on_device(self.job.shares.passes))
        self._started = _StartedUpdate(
            before=self.progress, place=place, measures=measures, rates=stepper.rates, read=read
        )

    def _finish_update(self, *, leaves: bool = False) -> None:
        """Count the update in hands, and report, evaluate and save as all ranks agree; of a late job the one before."""
        self._drop_micro_batch()
        if self._started is None:
            requests = self._agree(leaves=leaves)
        else:
            # The update before is read only now that this one was started, so the device has work while the host
            # waits.
            former, self._unread, self._started = self._unread, self._started, None
            self.progress = self._move_on(self.progress, ended=False)
            requests = NO_REQUESTS if former is None else self._read(former)
        evaluate, save = self.cadences.evaluations.due(self.progress), self.cadences.saves.due(self.progress)
        at_end = self.progress.update >= self.job.total_updates
        # Whatever acts on the weights of now needs their update counted, so it is read without waiting for the next
        # one.
        if self._unread is not None and (requests.stop or requests.why or evaluate or save or at_end):
            last, self._unread = self._unread, None
            requests |= self._read(last)
        self.hooks.inspect(self.progress)
        if save or self._held is not NO_REQUESTS:
            requests |= self._held | Requests(save_due=save)
        self._held = requests if self.holds else NO_REQUESTS
        if not self.holds:
            self._after_update(evaluate=evaluate, save=requests.why, stop=requests.stop)

    def _agree(self, *, leaves: bool) -> Requests:
        """Agree with the other ranks after an update, count it, and report it."""
        before, measures, feed = self.progress, self._measures, self.job.feed
        steppers = self.job.steppers
        # A script may have trained some of its models only; what the others have is of an earlier update.
        done = [stepper for stepper in steppers if stepper.done] or steppers
        # Several models make one update, which is not finite as soon as one of their norms is not.
        norm = next((stepper.norm for stepper in done if not math.isfinite(stepper.norm)), done[0].norm)
        is_reported = self._is_reported(before, norm)
        # Reading metrics waits for the device, so only reported updates send theirs.
        names = measures.names if is_reported else ()
        place = RankPlace(
            update=before.update,
            leaves=leaves,
            order=feed.order(before.epoch),
            names=names,
            models=tuple(stepper.name for stepper in done) if len(steppers) > 1 else (),
            skips=tuple(stepper.name for stepper in done if stepper.use is Use.SKIPPED),
            learning_rates=tuple(rate for stepper in done for rate in stepper.rates.learning_rates),
            momenta=tuple(stepper.rates.momentum for stepper in done),
        )
        metrics = [*measures.read(self.job.shares.passes), measures.data_wait_s] if is_reported else []
        requests, means = self._agreement.agree(self._requests(), place, metrics)
        self.progress = count_update(self._move_on(before, ended=requests.epoch_ends), finite=math.isfinite(norm))
        check_finite(before, self.progress, max_nonfinite=self.cadences.max_nonfinite)
        if is_reported:
            self._report(before, measures, all_rates(steppers), norm, means)
        return requests

    def _read(self, unread: _StartedUpdate) -> Requests:
        """Read the metrics of an update that was started, count it, and report it."""
        norm, numbers = unread.read()
        requests = self._agreement.read_requests(numbers[:HEAD], unread.place)
        progress = self.progress
        # What was skipped until then is known by now, and was not when the update was started.
        before = replace(unread.before, skipped=progress.skipped, skipped_in_a_row=progress.skipped_in_a_row)
        self.progress = count_update(progress, finite=math.isfinite(norm))
        # The time between two readings: an update is started before the former one has been computed.
        measures = replace(unread.measures, start_s=max(unread.measures.start_s, self._read_at))
        self._read_at = self.hooks.clock()
        check_finite(before, self.progress, max_nonfinite=self.cadences.max_nonfinite)
        if self._is_reported(before, norm):
            self._report(before, measures, unread.rates, norm, [*numbers[HEAD + 1 :], numbers[HEAD]])
        return requests

    def _move_on(self, progress: Progress, *, ended: bool) -> Progress:
        feed = self.job.feed
        return move_on(progress, updates_per_epoch=feed.updates_per_epoch, samples=feed.samples(progress), ended=ended)

    def _requests(self) -> Requests:
        """Return what this rank asks for. The clocks of ranks differ, so that of rank 0 counts."""
        overdue = self.cadences.saves.overdue(self.hooks.clock() - self._saved_at)
        return Requests(
            stop=self.hooks.stop(),
            save=self.hooks.save_requested(),
            save_due=self.save_now or (overdue and self.job.session.collective.rank == 0),
            epoch_ends=self.job.feed.ends_after(self.progress),
        )

    def _is_reported(self, before: Progress, norm: float) -> bool:
        return before.update % self.cadences.report_every == 0 or not math.isfinite(norm)

    def _report(self, before: Progress, measures: Measures, rates: Rates, norm: float, means: Sequence[float]) -> None:
        """Pass a record to ``on_update``; ``means``: of each metric and, at the end, of the seconds of waiting for data."""
        *losses, waited_s = (float(x) for x in means)
        update = FinishedUpdate(
            before=before,
            updates_per_epoch=self.job.feed.updates_per_epoch,
            total_updates=self.job.total_updates,
            global_batch=self.job.feed.samples(before),
            losses=dict(zip(measures.names, losses, strict=True)),
            rates=rates,
            norm=norm,
            seconds=self.hooks.clock() - measures.start_s,
            waited_s=waited_s,
            models=by_model(self.job.steppers),
        )
        self.hooks.on_update(update.record(self.job.session))

    # ------------------------------------------------------------------------------------------- evaluating and saving
    def _make_up_for_evaluation(self) -> None:
        """Evaluate where the interrupted run was asked to end before an evaluation that was due."""
        unscored = self.progress.update > 0 and self.progress.scored_update != self.progress.update
        if unscored and self.cadences.evaluations.due(self.progress):
            self._after_update(evaluate=True, save=None)

    def _after_update(self, *, evaluate: bool, save: Why | None, stop: bool = False) -> None:
        """Evaluate and save as requested. With ``stop``, save and raise ``Interrupted``."""
        if save == "requested" and evaluate and not stop:  # Whoever asks may have less time than an evaluation takes.
            self._save(None, save)
            save = "due" if self.cadences.saves.due(self.progress) else None
        score = self.score
        if evaluate and not stop:
            try:
                score = self._evaluate()
            except Interrupted:  # The job is saved first, and evaluates here when it is resumed.
                stop = True
        gained = score is not None and self.progress.epochs_without_gain == 0
        if stop or save or gained:
            self._save(score, "ending" if stop else save or "best")
        if stop:
            raise Interrupted(f"ended from outside at update {self.progress.update}, state saved; go on with --resume")

    def _evaluate(self) -> float | None:
        scores = self.hooks.evaluate(self.progress)
        score = scores.get("score")
        self.progress = (
            replace(self.progress, scored_update=self.progress.update)
            if score is None
            else count_score(self.progress, score)
        )
        return score

    def _save(self, score: float | None, why: Why) -> None:
        self.hooks.save(replace(self.progress), score, why)
        self._saved_update = self.progress.update
        self._saved_at = self.hooks.clock()
        self.save_now, self.score = False, None
