"""Start the training loop of a script on its data, and save the job for it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mtrain.core.interfaces import HostBatch, Progress, RankSession, Rates, Why
from mtrain.core.samples import resumed_samples
from mtrain.core.samples.sampler import Shares
from mtrain.core.update import cadence
from mtrain.core.update.cadence import Cadences
from mtrain.core.update.loop import Hooks, Job, Loop
from mtrain.core.update.schedule import Schedule
from mtrain.core.update.stepping import Stepper
from mtrain.data import trees
from mtrain.errors import ScriptError
from mtrain.rank.profiling import Profile
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.models import ScriptModel, saved_state
from mtrain.rank.script.prepared import Prepared
from mtrain.rank.script.reading.reading import Reading, number_of_updates
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
        self.loop = ScriptLoop(Loop(job, self._cadences(), self._hooks(), progress), differs=reading.differs)
        for entry, stepper in zip(models.with_optimizer, job.steppers, strict=True):
            entry.updater.stepper, entry.updater.loop = stepper, self.loop

    def _loops_job(self, progress: Progress) -> Job:
        """Return what the loop trains, and on what."""
        prepared, shares = self._prepared, self._prepared.shares
        assert shares is not None
        feed = ScriptFeed(
            rank=self._prepared.rank,
            reading=self.reading,
            shares=shares,
            fills_shards=any(entry.spec.train.sync_batchnorm for entry in prepared.models),
            floats=prepared.floats,
            saw=self.tracing.saw,
        )
        return Job(
            session=self._prepared.rank,
            steppers=[self._stepper(entry, progress) for entry in prepared.models.with_optimizer],
            feed=feed,
            total_updates=self.total_updates,
            shares=shares,
            seed=prepared.spec.train.seed,
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
            waits=self._prepared.records.training.stragglers,
        )

    def _save(self, progress: Progress, score: float | None, why: Why) -> None:
        if why == "requested":
            self._prepared.job.save_requested.mark_served()
        state = self._prepared.records.training.stream(*self._prepared.models.as_stepped)
        stream = self.reading.state_before(progress.epoch, progress.position)
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


@dataclass(kw_only=True)
class ScriptFeed:
    """See ``core.feed.Feed``."""

    rank: RankSession
    reading: Reading
    shares: Shares
    fills_shards: bool
    """Whether no shard of an update may be empty."""
    floats: Any
    """Dtype of floating-point arrays in batches; None: as the data set has them."""
    saw: Callable[[HostBatch], None]
    """Takes note of the arrays of the next micro batch."""
    _structures: list[Any] = field(default_factory=list)

    @property
    def updates_per_epoch(self) -> int | None:
        """See ``Feed.updates_per_epoch``."""
        return self.reading.updates_per_epoch

    def samples(self, progress: Progress) -> int:
        """See ``Feed.samples``."""
        return self.reading.size(progress.epoch, progress.position)

    def fill(self, progress: Progress, number: int) -> float:
        """See ``Feed.fill``.

        Raises:
            ScriptError: a shard has no sample, and BatchNorm layers take statistics over all shards.
        """
        samples, shards = self.samples(progress), self.shares.shards * self.shares.rounds
        if self.fills_shards and samples < shards:
            raise ScriptError(
                f"session.batches: update {progress.update} has {samples} of the {shards} samples that one in each micro batch of each "
                "rank would need, because sync_batchnorm is on; leave such batches out (drop_last=True), or train without it"
            )
        return self.shares.fill(number, samples)

    @property
    def spans_epochs(self) -> bool:
        """See ``Feed.spans_epochs``."""
        return self.reading.spans_epochs

    def open(self, progress: Progress) -> Iterator[Any]:
        """See ``Feed.open``."""
        self._structures = []
        # A backend moves flat mappings, some of them ahead of their use, so their nestings wait in a queue beside them.
        for tensors in self.rank.batches(self._host_batches(progress.epoch, progress.position)):
            yield trees.rebuilt(self._structures.pop(0), tensors)

    def _host_batches(self, epoch: int, position: int) -> Iterator[Mapping[str, Any]]:
        """Yield the arrays of the batches, and remember their structure until the device has them."""
        while True:
            for batch in self.reading.micro_batches(epoch, position, shares=self.shares):
                arrays, structure = trees.flatten(batch, floats=self.floats)
                if not arrays:
                    raise ScriptError(
                        f"session.batches: a batch of type {type(batch).__name__} holds no array and no tensor; return arrays, "
                        "tensors or numbers from the data set, or give a `collate`"
                    )
                self._structures.append(structure)
                self.saw(arrays)
                yield arrays
            epoch, position = epoch + 1, 0

    def ends_after(self, progress: Progress) -> bool:
        """See ``Feed.ends_after``."""
        return self.reading.ends_after(progress.epoch, progress.position)

    def order(self, epoch: int) -> int:
        """See ``Feed.order``."""
        return self.reading.mark(epoch)

    def close(self) -> None:
        """See ``Feed.close``."""
        self.reading.close()
