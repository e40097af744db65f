"""Start the training loop of a script on its data, and save the job for it."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mtrain.core.interfaces import Progress, Rates, Why
from mtrain.core.samples import resumed_samples
from mtrain.core.update import cadence
from mtrain.core.update.cadence import Cadences
from mtrain.core.update.loop import Hooks, Job, Loop
from mtrain.core.update.schedule import Schedule
from mtrain.core.update.stepping import Stepper
from mtrain.errors import ScriptError
from mtrain.rank.profiling import Profile
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.models import ScriptModel, saved_state
from mtrain.rank.script.prepared import Prepared
from mtrain.rank.script.reading.reading import Delivery, Reading, number_of_updates
from mtrain.rank.script.rules import RateOf
from mtrain.rank.tracing import Tracing
from mtrain.spec.model import Spec


class Training:
    """The training of the models of a session on what one reading gives."""

    def __init__(self, prepared: Prepared, reading: Reading, progress: Progress, *, stop: Callable[[], bool]) -> None:
        """Start the loop at ``progress``, which is that of the checkpoint where one is resumed. Every rank must call.

        ``stop``: see ``Hooks``.

        Raises:
            ScriptError: the length of the loop is not known.
            CheckpointError: the job was saved with other data or another batch.
        """
        assert prepared.shares is not None
        self._prepared = prepared
        self._stop = stop
        self.reading = reading
        self.total_updates = number_of_updates(prepared.spec, reading)
        if prepared.job.trial is not None:
            self.total_updates = min(self.total_updates, prepared.job.trial.updates)
        if prepared.saved is not None:
            body = {"extra": prepared.saved.meta["extra"]}
            resumed_samples.check_same(
                resumed_samples.facts(count=reading.length), body, spec=prepared.spec, progress=progress
            )
            reading.check_continues(progress)
            reading.restore(prepared.records.saved_stream())
        models = prepared.models
        self.tracing = Tracing(
            prepared.spec.report.trace, prepared.rank, models.groups, models.state, accumulate=prepared.shares.passes
        )
        fields = {
            "total_updates": self.total_updates,
            "updates_per_epoch": reading.updates_per_epoch,
            "precision": prepared.spec.train.precision,
            "model": models.title,
            "train_samples": reading.length,
            **self.tracing.start(),
        }
        prepared.records.announce(prepared.spec, fields)
        # As a plain loop does; models without an optimizer stay in the mode that the script has given them.
        for entry in models.with_optimizer:
            entry.module.train()
        job = self._loops_job(progress)
        self.loop = ScriptLoop(
            Loop(job, self._cadences(), self._hooks(), progress),
            differs=reading.differs,
            undisturbed=prepared.keep_draws,
        )
        if prepared.draws is not None:
            prepared.records.kept.keep("random numbers of the script", prepared.draws)
        for entry, stepper in zip(models.with_optimizer, job.steppers, strict=True):
            entry.updater.stepper, entry.updater.loop = stepper, self.loop

    def _loops_job(self, progress: Progress) -> Job:
        """Return what the loop trains, and on what."""
        prepared, shares = self._prepared, self._prepared.shares
        assert shares is not None
        self.reading.delivery = Delivery(
            rank=self._prepared.rank,
            shares=shares,
            fills_shards=any(entry.spec.train.sync_batchnorm for entry in prepared.models),
            floats=prepared.floats,
            saw=self.tracing.saw,
        )
        return Job(
            session=self._prepared.rank,
            steppers=[self._stepper(entry, progress) for entry in prepared.models.with_optimizer],
            feed=self.reading,
            total_updates=self.total_updates,
            shares=shares,
            seed=prepared.spec.train.seed if prepared.draws is None else None,
            draws_alike=self.reading.draws_alike,
        )

    def _stepper(self, entry: ScriptModel, progress: Progress) -> Stepper:
        schedule = entry.stepped or learning_rates_of(
            self._lasting(entry.spec),
            entry.learning_rate_of,
            updates_per_epoch=self.reading.updates_per_epoch or self.total_updates,
            total_updates=self.total_updates,
        )
        return entry.stepper(schedule, count=self._updates_of(entry, progress))

    def _lasting(self, spec: Spec) -> Spec:
        """Return the spec of a model with the batch and length that ``session.batches`` has set."""
        train = self._prepared.spec.train
        lasting = {"batch_size": train.batch_size, "epochs": train.epochs, "updates": train.updates}
        return spec.model_copy(update={"train": spec.train.model_copy(update=lasting)})

    def _updates_of(self, entry: ScriptModel, progress: Progress) -> int:
        """Return how many updates a model has begun before this process."""
        if self._prepared.saved is None or not entry.own_order:
            return progress.update
        counters = saved_state(self._prepared.saved.state, entry.name).counters
        return int(counters["updates"] + counters["skipped"])

    def _cadences(self) -> Cadences:
        spec = self._prepared.spec
        return Cadences(
            report_every=spec.report.every_updates,
            saves=cadence.saves(spec.checkpoint),
            evaluate_at_end=False,
            max_nonfinite=spec.train.max_nonfinite,
        )

    def _hooks(self) -> Hooks:
        profile = Profile(self._prepared.rank, self._prepared.spec.report.profile, self._prepared.job.run_folder)
        return Hooks(
            inspect=profile,
            close=profile.close,
            on_update=lambda record: self._prepared.records.report_update(
                {**record, "unit": "samples", **self.tracing.fields_of(record)}
            ),
            save=self._save,
            stop=self._stop,
            save_requested=self._prepared.job.save_requested,
        )

    def _save(self, progress: Progress, score: float | None, why: Why) -> None:
        if why == "requested":
            self._prepared.job.save_requested.mark_served()
        state = self._prepared.records.training.stream(*self._prepared.models.as_stepped)
        stream = self.reading.state_before(progress.epoch, progress.position)
        if progress.update:
            self._prepared.records.kept.samples = self.reading.size(*self.reading.place(progress.update - 1))
        self._prepared.records.save(state, progress, score=score, why=why, spec=self._prepared.spec, stream=stream)


def learning_rates_of(
    spec: Any, learning_rate_of: RateOf | None, *, updates_per_epoch: int, total_updates: int
) -> Callable[[int], Rates]:
    """Return the function from the number of an update to its learning rates; ``rate_of``: the script's own, if it has one."""
    if learning_rate_of is None:
        return Schedule(spec, updates_per_epoch=updates_per_epoch, total_updates=total_updates)
    return partial(
        _own_learning_rates, learning_rate_of, [group.learning_rate_factor for group in spec.optimizer.groups]
    )


def _own_learning_rates(learning_rate_of: RateOf, factors: Sequence[float], update: int) -> Rates:
    learning_rate = float(learning_rate_of(update))
    if not math.isfinite(learning_rate) or learning_rate < 0:
        raise ScriptError(
            f"session.prepare: the schedule returned {learning_rate} for update {update}; expected a learning rate of at least 0"
        )
    return Rates(learning_rates=[learning_rate * factor for factor in factors])
