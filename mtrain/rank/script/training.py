"""Start the training loop of a script on its data, and save the job for it."""

from collections.abc import Callable

from mtrain.core import cadence, resumed_samples
from mtrain.core.cadence import Cadences
from mtrain.core.interfaces import Progress, Why
from mtrain.core.loop import Hooks, Job, Loop
from mtrain.core.stepping import Stepper
from mtrain.rank.profiling import Profile
from mtrain.rank.script.feed import ScriptFeed
from mtrain.rank.script.loop import OTHER_ORDER, OTHER_SHARE, ScriptLoop
from mtrain.rank.script.made import MadeBatches
from mtrain.rank.script.models import ScriptModel, saved_state
from mtrain.rank.script.prepared import Prepared
from mtrain.rank.script.schedules import learning_rates_of
from mtrain.rank.script.stream import Stream
from mtrain.rank.script.training_data import Source, check_continues, number_of_updates
from mtrain.rank.script.trials import shorten
from mtrain.rank.tracing import Tracing
from mtrain.spec.model import Spec


class Training:
    """The training of the models of a session on one source of micro batches."""

    def __init__(self, prepared: Prepared, source: Source, progress: Progress, *, stop: Callable[[], bool]) -> None:
        """Start the loop at ``progress``, which is that of the checkpoint where one is resumed. Every rank must call.

        ``stop``: see ``Hooks``.

        Raises:
            ScriptError: the length of the loop is not known.
            CheckpointError: the job was saved with other data or another batch.
        """
        assert prepared.shares is not None
        self._prepared = prepared
        self._stop = stop
        self.source = source
        self.total_updates = shorten(number_of_updates(prepared.spec, source), prepared.job.trial)
        if prepared.saved is not None:
            body = {"extra": prepared.saved.meta["extra"]}
            resumed_samples.check_same(
                resumed_samples.facts(count=source.length), body, spec=prepared.spec, progress=progress
            )
            check_continues(progress, source)
            if isinstance(source, Stream):
                source.restore(prepared.records.saved_stream())
        models = prepared.models
        self.tracing = Tracing(
            prepared.spec.report.trace, prepared.rank, models.groups, models.state, accumulate=prepared.shares.passes
        )
        prepared.records.announce(
            prepared.spec,
            model=models.title,
            samples=source.length,
            updates_per_epoch=source.updates_per_epoch,
            total_updates=self.total_updates,
            fields=self.tracing.start(),
        )
        for entry in models.trained:
            entry.module.train()
        self.loop = ScriptLoop(
            Loop(self._loops_job(progress), self._cadences(), self._hooks(), progress),
            [entry.updater for entry in models.trained],
            differs=OTHER_SHARE if isinstance(source, MadeBatches) else OTHER_ORDER,
        )

    def _loops_job(self, progress: Progress) -> Job:
        """Return what the loop trains, and on what."""
        prepared, shares = self._prepared, self._prepared.shares
        assert shares is not None
        feed = ScriptFeed(
            rank=self._prepared.rank,
            source=self.source,
            shares=shares,
            fills_shards=any(entry.spec.train.sync_batchnorm for entry in prepared.models),
            floats=prepared.floats,
            saw=self.tracing.saw,
        )
        return Job(
            session=self._prepared.rank,
            steppers=[self._stepper(entry, progress) for entry in prepared.models.trained],
            feed=feed,
            total_updates=self.total_updates,
            shares=shares,
            seed=prepared.spec.train.seed,
        )

    def _stepper(self, entry: ScriptModel, progress: Progress) -> Stepper:
        schedule = entry.stepped or learning_rates_of(
            self._lasting(entry.spec),
            entry.learning_rate_of,
            updates_per_epoch=self.source.updates_per_epoch or self.total_updates,
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
            on_update=lambda record: self._prepared.records.updated(
                {**record, "unit": "samples", **self.tracing.updated(record)}
            ),
            save=self._save,
            stop=self._stop,
            save_requested=self._prepared.job.save_requested,
            waits=self._prepared.records.training.stragglers,
        )

    def _save(self, progress: Progress, score: float | None, why: Why) -> None:
        if why == "requested":
            self._prepared.job.save_requested.served()
        state = self._prepared.records.training.stream(*self._prepared.models.stepped)
        stream = self.source.state_before(progress.epoch, progress.position)
        self._prepared.records.save(state, progress, score=score, why=why, spec=self._prepared.spec, stream=stream)
