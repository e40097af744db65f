"""``mtrain.session``: joins the ranks of a job from a user's own training script."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core import cadence
from mtrain.core.cadence import Cadences
from mtrain.core.checkpoint.sharing import load_everywhere
from mtrain.core.completeness import check_session
from mtrain.core.evaluate import interruptible
from mtrain.core.interfaces import Backend, Collective, Progress, RankSession, Why
from mtrain.core.loop import Hooks, Job, Loop
from mtrain.core.recipe import make_recipe, shares_of
from mtrain.core.recomputing import patterns
from mtrain.core.sampler import Shares
from mtrain.data import trees
from mtrain.data.objects import seeded_sample
from mtrain.errors import Interrupted, ScriptError
from mtrain.rank.precision import settled
from mtrain.rank.script import evaluation, gradients
from mtrain.rank.script.building import Building
from mtrain.rank.script.epochs import BatchOf, Cutting, batch_at
from mtrain.rank.script.feed import ScriptFeed
from mtrain.rank.script.following import check_follow, check_untrained, submodules
from mtrain.rank.script.in_turn import InTurn, check_in_turn
from mtrain.rank.script.loaders import evaluated, read_loader
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.models import ScriptModel, ScriptModels, saved_state
from mtrain.rank.script.native import NativeOptimizer, recorded
from mtrain.rank.script.order import Order
from mtrain.rank.script.plain_python import solo_job
from mtrain.rank.script.records import Records
from mtrain.rank.script.rules import Curve, RateOf, Rule
from mtrain.rank.script.samples import check_dataset
from mtrain.rank.script.schedulers import MakeScheduler, SteppedScheduler
from mtrain.rank.script.schedules import learning_rates_of
from mtrain.rank.script.settings import SHARED_SETTINGS, changed, changes_of, check_loop, loop_changes
from mtrain.rank.script.stream import Shard, Stream, is_stream
from mtrain.rank.script.together import first_batch, several
from mtrain.rank.script.training_data import (
    Request,
    Source,
    check_continues,
    number_of_updates,
    opened,
    opened_together,
)
from mtrain.rank.script.trials import nudge, on_trial, shortened
from mtrain.rank.script.updater import Updater
from mtrain.rank.script.workers import is_imported_by_worker
from mtrain.rank.script_mode import RUNNING, RankJob, running, without_own_frames
from mtrain.rank.tracing import Tracing
from mtrain.spec.calls import explained
from mtrain.spec.model import Spec


@explained
@contextmanager
def session(*, framework: str | None = None, reporters: Sequence[Any] = ()) -> Iterator["Session"]:
    """Join the ranks of this job, and leave them at the end of the ``with`` block.

    Backend, ranks, device and seed are those of ``mtrain run``. A script that plain Python runs is a job of one rank.

    Args:
        framework: With plain Python, ``torch`` or ``paddle``; None: the one that the script has imported, else torch.
        reporters: Objects with methods of ``mtrain.core.interfaces.reporter.Reporter``, or functions of one record, beside those of the
            spec. They receive the records of rank 0, or of each rank where they have ``every_rank = True``.

    Raises:
        ScriptError: the script already has a session, or an object of ``reporters`` is none.
        UsageError: the ranks cannot be joined, or the backend's session is incomplete.
    """
    if is_imported_by_worker():
        raise ScriptError(
            "mtrain.session: called while a process that reads samples imports the script; put the code that trains under "
            'if __name__ == "__main__":'
        )
    around = running()
    if around.session_is_open:
        raise ScriptError("mtrain.session: this script has a session already; use one `with mtrain.session()` block")
    with ExitStack() as stack:
        job = around.job or stack.enter_context(solo_job(framework))
        backend = job.resolved.backend
        rank = stack.enter_context(backend)
        check_session(rank, backend=backend, name=job.spec.backend.name)
        if job.spec.report.times_waits:
            rank.capabilities.time_waits()
        current = Session(job, backend, rank, reporters)
        before = RUNNING.set(replace(around, session_is_open=True))
        try:
            yield current
            current._finish("done")
        except Interrupted:
            current._finish("interrupted")
            raise
        except BaseException as error:
            # Recorded before the backend is left, so before other ranks notice.
            job.leave(without_own_frames(error))
            current._finish("failed")
            raise
        finally:
            RUNNING.reset(before)


@explained
class Session:
    """One rank of a script's job."""

    def __init__(self, job: RankJob, backend: Backend, rank: RankSession, reporters: Sequence[Any] = ()) -> None:
        self._job = job
        self._rank = rank
        self._spec = job.spec
        self._saved = None if job.resume is None else load_everywhere(job.resume, rank.collective)
        self._progress = Progress() if self._saved is None else self._saved.progress
        self._models = ScriptModels(rank=rank)
        self._base = job.spec
        """The spec that all models share, once the first one is prepared; ``_spec`` has the first one's settings, too."""
        self._shared_settings: Mapping[str, Any] = {}
        """Settings of the script, by path of the spec, that all models share."""
        self._read: Source | None = None
        self._loop: ScriptLoop | None = None
        shards = job.spec.cluster.shards
        self._collective: Collective = (
            rank.collective
            if shards in (None, rank.collective.size)
            else InTurn(rank.collective, shards, self._in_loss, trial=job.trial)
        )
        self._shares: Shares | None = None
        """Which shards of an update this rank computes, as ``prepare`` has decided it."""
        self._total: int | None = None
        self._tracing: Tracing | None = None
        self._records = Records(job, backend, rank, self._saved, reporters=reporters)

    # ------------------------------------------------------------------------------------------- facts about the job
    @property
    def collective(self) -> Collective:
        """Communication among the ranks: ``all_reduce`` and ``all_gather``."""
        return self._collective

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self.collective.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.collective.size

    @property
    def device(self) -> str:
        """This rank's device as torch names it: ``cpu`` or ``cuda:1``. Batches and models are on it already."""
        return str(self._rank.device).partition(" ")[0]

    @property
    def progress(self) -> Progress:
        """How far the job has come: ``update``, ``epoch``, ``position`` and more."""
        return self._progress if self._loop is None else self._loop.progress

    @property
    def run_dir(self) -> Path:
        """The run folder, in which checkpoints, curves and logs are."""
        return self._job.run_folder.path

    # ------------------------------------------------------------------------------------------------ model and data
    def prepare(
        self,
        build: Callable[[], Any],
        *,
        optimizer: Rule | NativeOptimizer | None = None,
        schedule: Curve | RateOf | None = None,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        accumulate: int | None = None,
        ema: float | None = None,
        precision: str | None = None,
        sync_batchnorm: bool | None = None,
        freeze: Sequence[str] | None = None,
        seed: int | None = None,
        name: str | None = None,
        overlap: bool = True,
    ) -> tuple[Any, Updater]:
        """Build a model on this rank, and bind an optimizer to it. Every rank must call, once for each model.

        What is None is taken from the spec of ``mtrain run``, and is off where that sets nothing. A value that
        contradicts one that was set there is refused.

        Args:
            build: Makes the model, a native module of the framework; called once, with the job's seed set.
            optimizer: The update rule, such as ``mtrain.AdamW(learning_rate=1e-3)``, or a function from the model to an optimizer of
                the framework. Of a model with a name, None means that no update changes it: a teacher or a target network.
            schedule: A curve such as ``mtrain.Cosine(warmup=100)``, or a function from update to learning rate.
            scheduler: In its place, a function that makes a scheduler of ``torch.optim.lr_scheduler`` from an optimizer, or one
                of ``paddle.optimizer.lr`` from a learning rate. The script steps it: ``optimizer.scheduler.step()``.
            clip_norm: Largest global L2 norm of the gradient.
            accumulate: Micro batches per update.
            ema: Decay of an exponential moving average of the weights, which is evaluated in their place.
            precision: ``fp32``, ``bf16``, ``fp16`` (mixed), ``fp64``, or ``auto``, see ``train.precision``.
            sync_batchnorm: BatchNorm statistics over all ranks.
            freeze: Regular expressions; parameters in whose name one is found are not trained.
            seed: Of start values, order, augmentation and dropout.
            name: Of this model, where a session trains several. Its optimizer computes the gradients of this model alone.
            overlap: Whether gradients are exchanged while they are computed, which allows one loss per batch. With a name they
                are exchanged afterwards.

        Returns:
            The model to call in the loop, and its optimizer.

        Raises:
            ScriptError: a value is wrong or contradicts the spec, or a name is missing or taken.
        """
        if self._loop is not None:
            raise ScriptError("session.prepare: called after session.batches; prepare all models first")
        name = self._models.check_name(name)
        trained = not name or optimizer is not None
        if not trained:
            check_untrained(name, schedule=schedule, scheduler=scheduler, clip_norm=clip_norm, ema=ema, freeze=freeze)
        # The first model is trained in the backend's own way where that is the only one.
        is_further = bool(self._models.trained) or self._rank.capabilities.own_order
        own_order = not overlap or (bool(name) and trained and is_further)
        building = Building(build)
        changes = changes_of(
            optimizer=optimizer, schedule=schedule, clip_norm=clip_norm, accumulate=accumulate, ema=ema,
            precision=precision, sync_batchnorm=sync_batchnorm, freeze=freeze, seed=seed,
        )  # fmt: skip
        shared = {path: value for path, value in changes.items() if path in SHARED_SETTINGS}
        self._share(shared, accumulate=accumulate)
        spec = self._changed(self._base, {path: x for path, x in changes.items() if path not in shared})
        check_in_turn(spec, size=self.size, trial=self._job.trial)
        # The recipe needs a batch that divides into the shards; the script names its own later, in `batches`.
        shards = spec.cluster.shards or self.size
        sized = changed(spec, {"train.batch_size": shards * spec.train.accumulate})
        native_optimizer = recorded(optimizer, self._job.outside_paths)
        recipe = replace(
            make_recipe(sized, size=self.size),
            own_model=True,
            own_order=own_order,
            named=bool(name),
            trained=trained,
            native_optimizer=native_optimizer,
            recompute=patterns(sized.train, (), model="of the script"),
        )
        self._shares = shares_of(recipe, self._rank.collective)
        self._records.shards = self._shares.shards * self._shares.rounds
        model, native = self._rank.prepare(building, recipe)
        if trained:
            gradients.watch(building.module, lambda: None if self._loop is None else self._loop.saw_gradients())
        if native_optimizer is not None:
            spec = self._changed(spec, {"optimizer.learning_rate": native_optimizer.learning_rate})
        stepped = self._stepped(scheduler, spec, name, schedule=schedule)
        updater = Updater(native, None if stepped is None else stepped.scheduler, untrained="" if trained else name)
        self._spec = spec if not self._models.trained else self._spec
        self._models.add(
            ScriptModel(
                name=name,
                spec=spec,
                module=building.module,
                model=model,
                updater=updater,
                learning_rate_of=schedule if callable(schedule) and not hasattr(schedule, "section") else None,
                stepped=stepped,
                own_order=own_order,
                trained=trained,
                shapes=building.shapes,
            )
        )
        if self._saved is not None:
            self._rank.restore(model, native, saved_state(self._saved.state, name))
        elif self._job.trial is not None and self._job.trial.nudged:
            nudge(self._rank, model, native)
        return model, updater

    def _stepped(
        self, make: MakeScheduler | None, spec: Spec, name: str, *, schedule: Curve | RateOf | None
    ) -> SteppedScheduler | None:
        """Make the scheduler of a model, and keep its state."""
        if make is None:
            return None
        if schedule is not None:
            raise ScriptError("session.prepare: schedule= and scheduler= are both given; keep one")
        stepped = SteppedScheduler(
            make,
            framework=self._job.resolved.backend.framework,
            learning_rate=spec.optimizer.learning_rate,
            factors=[group.learning_rate_factor for group in spec.optimizer.groups],
        )
        self._records.keep(f"scheduler of {name}" if name else "scheduler", stepped)
        return stepped

    def _share(self, settings: Mapping[str, Any], *, accumulate: int | None) -> None:
        """Take the settings that all models share from the first one, and compare those of further ones.

        Raises:
            ScriptError: a further model has other ones.
        """
        if len(self._models) == 0:
            if self._spec.train.accumulate == "auto" and accumulate is None:
                settings = {**settings, "train.accumulate": 1}
            spec = self._changed(self._spec, settings)
            self._base, self._records.choices = settled(on_trial(spec, self._job.trial), self._rank)
            self._shared_settings = settings
            return
        for path, value in settings.items():
            if path not in self._shared_settings or self._shared_settings[path] != value:
                first = self._shared_settings.get(path)
                raise ScriptError(
                    f"session.prepare: {path.rpartition('.')[2]}={value!r} given, but {first!r} for the first model; it holds "
                    "for all models of a session: say it at the first one alone"
                )

    def _changed(self, spec: Spec, changes: Mapping[str, Any], *, call: str = "session.prepare") -> Spec:
        result: Spec = changed(spec, changes, outside_paths=self._job.outside_paths, call=call)
        return result

    def keep(self, name: str, kept_object: Any) -> None:
        """Save ``kept_object`` in checkpoints too, and restore it now if the job is resumed.

        The object has ``state_dict()`` and ``load_state_dict(state)``. The state of rank 0 is saved, and restored on
        all ranks. Call it before ``batches``.

        Raises:
            ScriptError: the object lacks these methods, the name is taken, or the state cannot be stored.
            CheckpointError: the checkpoint that is resumed has no state of this name.
        """
        self._records.keep(name, kept_object)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch: int | BatchOf | Mapping[str, int] | tuple[int, ...] | None = None,
        epochs: int | None = None,
        updates: int | None = None,
        order: Order | None = None,
        drop_last: bool | None = None,
        shard: Shard | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        nondeterministic: str = "refuse",
        workers: int | None = None,
    ) -> Iterator[Any]:
        """Yield the micro batches of this rank, from where the job stands to its end. Every rank must iterate.

        Which samples form an update depends on (seed, epoch, update) alone, so it is the same for every number of
        ranks. Between updates the job is saved as the spec's ``checkpoint`` section says, and a request to end is
        followed. Call ``optimizer.update(loss)`` once for each batch.

        Args:
            dataset: Any object with ``__len__`` and ``__getitem__``, or a stream: any object with ``__iter__``. Of a DataLoader
                of torch or Paddle the data set, the samplers, ``batch_size``, ``collate_fn`` and ``num_workers`` are taken. Several
                data sets by name, or a tuple of DataLoaders, are read side by side, and a batch is a dict or tuple of theirs; the
                first one counts epochs, and the others begin again as often as needed.
            global_batch: Samples per update over all ranks, or a function from the epoch to them; with several data sets a number
                for each, by name or place. None: those of a batch of the DataLoader.
            epochs: Passes over the data set; give this or ``updates``.
            updates: Updates in all.
            order: Maps an epoch to the numbers of its samples, in place of mtrain's own order. However many they are, they
                are the epoch, so a number may be left out or come repeatedly.
            drop_last: Whether the last samples of an epoch are left out where they make no whole batch; else they are a shorter
                one. None: as the DataLoader says, else True.
            shard: Maps (rank, number of ranks) to the part of a stream that this rank reads; None: each rank reads all
                of it, and keeps its share.
            collate: Joins a list of samples to a batch, in place of stacking.
            nondeterministic: ``allow``: accept a data set that returns other values when it is read again.
            workers: Processes per rank that read samples ahead; 0: this process reads them. None: as the DataLoader says, else 0.

        Raises:
            ScriptError: the data set or a value cannot be used.
        """
        if self._shares is None:
            raise ScriptError("session.batches: called before session.prepare; prepare the model first")
        if not self._models.trained:
            raise ScriptError(
                "session.batches: no model has an optimizer; give session.prepare(..., optimizer=mtrain.AdamW(learning_rate=1e-3)) for one"
            )
        if self._loop is not None:
            raise ScriptError("session.batches: called twice; one session has one training loop")
        outside = self._job.outside_paths
        parts = several(dataset)
        if parts is not None and (order or shard or collate):
            raise ScriptError(
                "session.batches: order, shard or collate given with several data sets; give each as a DataLoader with its own sampler and "
                "collate_fn"
            )
        first = dataset if parts is None else next(iter(parts.values() if isinstance(parts, Mapping) else parts))
        read = read_loader(first, call="session.batches")
        one_batch: Any = global_batch if parts is None else first_batch(global_batch)
        own_batches = read.batches if one_batch is None and order is None else None
        if one_batch is None and "train.batch_size" not in outside:
            one_batch = read.batch_size
        if callable(one_batch) and is_stream(read.dataset, shard):
            raise ScriptError(
                "session.batches: global_batch is a function, but a stream's epochs have no known length; give a number"
            )
        changes = loop_changes(
            global_batch=batch_at(one_batch, 0, len(read.dataset)) if callable(one_batch) else one_batch,
            epochs=epochs,
            updates=updates,
            outside_paths=outside,
        )
        self._spec = self._changed(self._spec, changes, call="session.batches")
        check_loop(self._spec, self._shares, divides=own_batches is None and not callable(one_batch))
        request = Request(
            cutting=Cutting(
                batch=one_batch if callable(one_batch) else self._spec.train.batch_size,
                order=order or read.order,
                batches=own_batches,
                drops_last=read.drops_last if drop_last is None else drop_last,
            ),
            shard=shard,
            collate=collate or read.collate,
            nondeterministic=nondeterministic,
            # Streams are read in this process, whatever the loader would have done.
            workers=workers if workers is not None else 0 if is_stream(read.dataset, shard) else read.workers,
        )
        seed_framework = self._rank.capabilities.seed
        self._read = samples = (
            opened(read.dataset, request, self._spec, self._shares, seed_framework)
            if parts is None
            else opened_together(
                parts, global_batch, replace(request, workers=workers), self._spec, self._shares, seed_framework
            )
        )
        self._total = shortened(number_of_updates(self._spec, samples), self._job.trial)
        if self._saved is not None:
            check_continues(self._progress, samples)
            if isinstance(samples, Stream):
                samples.restore(self._records.saved_stream())
        self._tracing = tracing = Tracing(
            self._spec.report.trace,
            self._rank,
            self._models.groups,
            self._models.state,
            accumulate=self._shares.passes,
        )
        self._records.announce(
            self._spec,
            model=self._models.title,
            samples=samples.length,
            updates_per_epoch=samples.updates_per_epoch,
            total_updates=self._total,
            fields=tracing.start(),
        )
        for entry in self._models.trained:
            entry.module.train()
        self._loop = self._begin(samples, tracing)
        return self._loop

    def _begin(self, samples: Source, tracing: Tracing) -> ScriptLoop:
        """Make the training loop with everything that it calls."""
        assert self._total is not None
        assert self._shares is not None
        spec, shares = self._spec, self._shares
        steppers = []
        for entry in self._models.trained:
            schedule = entry.stepped or learning_rates_of(
                self._lasting(entry.spec),
                entry.learning_rate_of,
                updates_per_epoch=samples.updates_per_epoch or self._total,
                total_updates=self._total,
            )
            steppers.append(entry.stepper(schedule, count=self._updates_of(entry)))
        job = Job(
            session=self._rank,
            steppers=steppers,
            feed=ScriptFeed(
                rank=self._rank,
                source=samples,
                shares=shares,
                fills_shards=any(entry.spec.train.sync_batchnorm for entry in self._models),
                floats=self._floats(),
                saw=tracing.saw,
            ),
            total_updates=self._total,
            shares=shares,
            seed=spec.train.seed,
        )
        cadences = Cadences(
            report_every=spec.report.every_updates,
            saves=cadence.saves(spec.checkpoint),
            evaluate_at_end=False,
            max_nonfinite=spec.train.max_nonfinite,
        )
        hooks = Hooks(
            on_update=lambda record: self._records.updated({**record, "unit": "samples", **tracing.updated(record)}),
            save=self._save,
            stop=self._asked_to_end,
            save_requested=self._job.save_requested,
        )
        return ScriptLoop(Loop(job, cadences, hooks, self._progress), [entry.updater for entry in self._models.trained])

    def _lasting(self, spec: Spec) -> Spec:
        """Return the spec of a model with the batch and length that ``batches`` has set."""
        train = self._spec.train
        lasting = {"batch_size": train.batch_size, "epochs": train.epochs, "updates": train.updates}
        return spec.model_copy(update={"train": spec.train.model_copy(update=lasting)})

    def _updates_of(self, entry: ScriptModel) -> int:
        """Return how many updates a model has begun before this process."""
        if self._saved is None or not entry.own_order:
            return self._progress.update
        counters = saved_state(self._saved.state, entry.name).counters
        return int(counters["updates"] + counters["skipped"])

    # --------------------------------------------------------------------------------------- evaluation and logging
    def evaluate(
        self,
        model: Any,
        dataset: Any,
        *,
        metric: evaluation.Metric,
        step: Callable[[Any, Any], evaluation.Outcome] | None = None,
        batch_size: int | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        score: str | None = None,
    ) -> dict[str, float]:
        """Return metrics of the model on a data set that the ranks share, equal on every rank. Every rank must call.

        Every sample counts once, and predictions are in the order of the samples, for any number of ranks. With ``ema``
        the averaged weights are used.

        Args:
            model: The model from ``prepare``.
            dataset: Any object with ``__len__`` and ``__getitem__``, or a DataLoader of torch or Paddle, whose order does not
                matter.
            metric: Maps (predictions, targets) of all samples, as numpy arrays, to a number or a dict of numbers.
            step: Maps (model, batch) to (predictions, targets) of the batch; None: ``model.predict(batch)``, else
                ``model(inputs)`` with a batch (inputs, targets).
            batch_size: Samples per rank and forward pass; None: those of a micro batch.
            collate: Joins a list of samples to a batch.
            score: Name of the metric whose largest value marks the best checkpoint; None: ``score`` if there is one.

        Raises:
            ScriptError: the data set, the model's output or the metric's result cannot be used.
        """
        entry = self._models.of(model, call="session.evaluate")
        read = read_loader(dataset, call="session.evaluate")
        dataset, collate = evaluated(read), collate or read.collate
        check_dataset(dataset, call="session.evaluate")
        began = time.perf_counter()
        runner = evaluation.Step(entry.module, step or evaluation.predicted)
        order = evaluation.shares(
            len(dataset), self._rank.collective, batch_size or read.batch_size or self._micro_batch()
        )
        try:
            outcome = self._outcome(entry, runner, dataset, order, collate or trees.collate)
        except Interrupted as error:
            if self._loop is None:
                raise
            self._loop.loop.interrupt()
            raise Interrupted(
                f"{error} after update {self.progress.update}, state saved; go on with --resume"
            ) from None
        metrics = evaluation.scored(self._rank.collective, metric, *outcome)
        loop, progress = self._loop, self.progress
        best_score = self._records.scored(
            metrics,
            # In the body of the loop the update in hands is done, but not counted yet.
            update=progress.update + (loop is not None and loop.loop.has_updated),
            epoch=progress.epoch,
            score=score,
            seconds=time.perf_counter() - began,
        )
        if loop is not None and best_score is not None:
            loop.loop.score = best_score
        return metrics

    def _in_loss(self) -> bool:
        return self._loop is not None and self._loop.in_loss

    def _micro_batch(self) -> int:
        """Return the samples of a micro batch; before ``batches`` that of the spec's batch size."""
        assert self._shares is not None
        return max(1, int(self._spec.train.batch_size) // (self._shares.shards * self._shares.rounds))

    def _outcome(
        self,
        entry: ScriptModel,
        runner: evaluation.Step,
        dataset: Any,
        order: Iterator[list[int]],
        collate: Callable[[Any], Any],
    ) -> evaluation.Outcome:
        """Return (predictions, targets) of ``dataset``, computed with the averaged weights in evaluation mode."""
        seed, seed_framework = self._spec.train.seed, self._rank.capabilities.seed

        def batch_of(indices: Sequence[int]) -> Any:
            return collate([seeded_sample(dataset, index, (seed, index), seed_framework) for index in indices])

        order = interruptible(order, collective=self._rank.collective, stop=self._asked_to_end)
        with entry.updater.native.averaged():
            modes = [(module, module.training) for module in submodules(entry.module)]
            entry.module.eval()
            try:
                return evaluation.outcome(self._rank, runner, order, batch_of, floats=self._floats())
            finally:
                for module, training in modes:
                    module.training = training

    def _floats(self) -> Any:
        """Return the dtype of floating-point numbers in batches; None: as the data set has them."""
        return np.float64 if self._spec.train.precision == "fp64" else None

    def backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Add the gradients of a loss of the current micro batch to those of all models, as ``loss.backward()`` does.

        Call ``step`` of each optimizer afterwards. A loss of one model is given to ``optimizer.backward`` of that model.

        Args:
            loss: A single number with a gradient: the mean over the micro batch.
            retain_graph: Another loss is computed from the same graph afterwards.

        Raises:
            ScriptError: as for ``optimizer.update``.
        """
        updaters = [entry.updater for entry in self._models.trained]
        if not updaters:
            raise ScriptError("session.backward: called before session.prepare")
        for updater in updaters:
            updater.backward(loss, retain_graph=retain_graph or updater is not updaters[-1])

    def follow(self, target: Any, source: Any, tau: float = 1.0, *, buffers: bool = True) -> None:
        """Move a target network or a teacher towards another model: ``target += tau * (source - target)``. Every rank must call.

        With accumulation only the call after the last micro batch of an update does anything. Before the loop it says where the
        target starts; a resumed job leaves it as the checkpoint has it.

        Args:
            target: A model that was prepared with a name and without an optimizer.
            source: Another model, with parameters of the same names and shapes.
            tau: From 0 to 1; 1 copies the source.
            buffers: Whether buffers, such as the running statistics of BatchNorm, are copied.

        Raises:
            ScriptError: the target has an optimizer, or one of the arguments does not fit.
        """
        own, other = (self._models.of(model, call="session.follow") for model in (target, source))
        check_follow(own, other, tau)
        move = self._rank.capabilities.follow
        if move is None:
            raise ScriptError(
                "session.follow: this backend cannot move a model towards another one; use ddp, horovod or solo"
            )
        if self._loop is None:
            if self._saved is not None:
                return
        elif self._loop.in_middle:
            return
        move((own.model, own.updater.native), (other.model, other.updater.native), tau, buffers)

    def log(self, **values: Any) -> None:
        """Report values of the current update: numbers or tensors, as means over micro batches and ranks.

        Every rank must log the same names. Tensors are read after the update, so nothing waits for the device here.
        """
        if self._loop is None:
            raise ScriptError("session.log: called outside of the loop of session.batches")
        self._loop.log(values)

    def print(self, *values: Any) -> None:
        """Show a line on the terminal of the job, from rank 0 alone."""
        self._records.report.event("note", message=" ".join(map(str, values)))

    def image(self, name: str, picture: Any) -> None:
        """Show a picture in the reports of the job, as one of the current update. That of rank 0 counts.

        It is kept as ``images/<name>-<update>.png`` of the run folder, and TensorBoard and other reporters receive it.

        Args:
            name: Letters, digits, ``_``, ``-`` and ``/``, such as ``samples/fixed``.
            picture: An array or tensor, (height, width) or (height, width, 1, 3 or 4) or (1, 3 or 4, height, width), of numbers from
                0 to 1, or of bytes; or an image of Pillow; or a figure of matplotlib, which stays open.

        Raises:
            ScriptError: the name or the picture cannot be used.
        """
        self._records.image(name, picture, update=self.progress.update)

    figure = image

    def histogram(self, name: str, values: Any, *, bins: int = 64) -> None:
        """Show how values are distributed in the reports of the job, at the current update. Those of rank 0 count.

        Args:
            name: Letters, digits, ``_``, ``-`` and ``/``.
            values: An array or tensor of any shape; what is not finite is left out.
            bins: Number of ranges of equal width.

        Raises:
            ScriptError: there are no numbers, or the name cannot be used.
        """
        self._records.histogram(name, values, bins=bins, update=self.progress.update)

    def save(self, name: str | None = None) -> None:
        """Save a checkpoint after the current update, in addition to those of the spec. Every rank must call.

        Args:
            name: Keep it as ``checkpoints/<name>`` of the run folder, too, where ``checkpoint.keep_last`` deletes nothing; it can be
                resumed, evaluated and exported. A former one of this name is replaced.

        Raises:
            ScriptError: there is no update, or the name cannot be that of a folder.
        """
        if self._loop is None:
            raise ScriptError("session.save: called outside of the loop of session.batches")
        if name is not None:
            self._records.keep_next(name)
        self._loop.loop.save_now = True

    # ---------------------------------------------------------------------------------------------- saving and ending
    def _asked_to_end(self) -> bool:
        self._records.training.check()
        return self._job.stop()

    def _save(self, progress: Progress, score: float | None, why: Why) -> None:
        if why == "requested":
            self._job.save_requested.served()
        state = self._records.training.stream(*self._models.stepped)
        assert self._read is not None
        stream = self._read.state_before(progress.epoch, progress.position)
        self._records.save(state, progress, score=score, why=why, spec=self._spec, stream=stream)

    def _finish(self, reason: str) -> None:
        """Write what is left to write at the end; ``failed``: without the other ranks."""
        loop, stepped = self._loop, None
        if reason == "done" and loop is not None:
            loop.leave()
            loop.loop.finish()
        if reason == "done" and len(self._models):
            stepped = self._models.stepped
        measured = self._tracing.measured() if stepped is not None and self._tracing is not None else None
        self._records.end(
            reason, self.progress, spec=self._spec, total_updates=self._total, stepped=stepped, measured=measured
        )
