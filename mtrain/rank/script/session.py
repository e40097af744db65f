"""``mtrain.session``: joins the ranks of a job from a user's own training script."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint.sharing import load_everywhere
from mtrain.core.evaluate import interruptible
from mtrain.core.interfaces import Backend, Collective, Progress, RankSession
from mtrain.core.ranks.arithmetic import check_ranks
from mtrain.data import trees
from mtrain.data.objects import seed_everything, seeded_sample
from mtrain.errors import Interrupted, ScriptError
from mtrain.rank.script import evaluation
from mtrain.rank.script.draws import OwnDraws
from mtrain.rank.script.in_turn import InTurn
from mtrain.rank.script.job import RUNNING, RankJob, running, without_own_frames
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.models import check_follow
from mtrain.rank.script.native import NativeOptimizer
from mtrain.rank.script.plain_python import solo_job
from mtrain.rank.script.prepared import ModelRequest, Prepared
from mtrain.rank.script.reading.given_data import GivenData
from mtrain.rank.script.reading.loaders import BatchOf, Order, Shard, evaluation_part, read_loader
from mtrain.rank.script.reading.made_batches import MadeBatches
from mtrain.rank.script.reading.nested import Bodies, Nested
from mtrain.rank.script.reading.reading import Reading, check_schedule
from mtrain.rank.script.reading.samples import check_dataset
from mtrain.rank.script.reading.workers import is_imported_by_worker
from mtrain.rank.script.records import ScriptRecords
from mtrain.rank.script.rules import Curve, RateOf, Rule
from mtrain.rank.script.schedulers import MakeScheduler
from mtrain.rank.script.settings import check_loop, loop_changes
from mtrain.rank.script.training import Training
from mtrain.rank.script.updater import Updater
from mtrain.spec.calls import explain_calls


@explain_calls
@contextmanager
def session(*, framework: str | None = None, reporters: Sequence[Any] = (), reseed: bool = True) -> Iterator["Session"]:
    """Join the ranks of this job, and leave them at the end of the ``with`` block.

    Backend, ranks, device and seed are those of ``mtrain run``. A script that plain Python runs is a job of one rank.

    Args:
        framework: With plain Python, ``torch`` or ``paddle``; None: the one that the script has imported, else torch.
        reporters: Objects with methods of ``mtrain.core.interfaces.reporter.Reporter``, or functions of one record, beside those of the
            spec. They receive the records of rank 0, or of each rank where they have ``every_rank = True``.
        reseed: Whether random numbers are seeded before each micro batch, which makes them those of its samples on any number of ranks.
            False: the script's draws are those of a plain loop, and of the rank.

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
        # Outside of `mtrain run` the script makes its own job, of one rank.
        job = around.job or stack.enter_context(solo_job(framework))
        job.take_back()
        backend = job.resolved.backend
        rank = stack.enter_context(backend)
        check_ranks(rank, backend=backend, name=job.spec.backend.name)
        if job.spec.report.times_waits:
            rank.capabilities.time_waits()
        current = Session(job, backend, rank, reporters, reseed=reseed)
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


@explain_calls
class Session:
    """One rank of a script's job."""

    def __init__(
        self, job: RankJob, backend: Backend, rank: RankSession, reporters: Sequence[Any] = (), *, reseed: bool = True
    ) -> None:
        self._job = job
        self._rank = rank
        self._saved = None if job.resume is None else load_everywhere(job.resume, rank.collective)
        self._progress = Progress() if self._saved is None else self._saved.progress
        self._records = ScriptRecords(job, backend, rank, self._saved, reporters=reporters)
        self._prepared = Prepared(
            job,
            rank,
            self._records,
            self._saved,
            saw_gradients=self._saw_gradients,
            draws=None if reseed else OwnDraws(backend.framework),
        )
        self._training: Training | None = None
        """The training loop, once there is one."""
        self._nested: Nested | None = None
        """The epochs that the script iterates over, around its batches."""
        self._bodies: Bodies | None = None
        """The bodies of a loop around the updates of a script that makes its batches."""
        shards = job.spec.cluster.shards
        self._collective: Collective = (
            rank.collective
            if shards in (None, rank.collective.size)
            else InTurn(rank.collective, shards, self._in_loss, trial=job.trial)
        )

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
    def _loop(self) -> ScriptLoop | None:
        return None if self._training is None else self._training.loop

    @property
    def progress(self) -> Progress:
        """How far the job has come: ``update``, ``epoch``, ``position`` and more."""
        return self._progress if self._loop is None else self._loop.progress

    @property
    def run_dir(self) -> Path:
        """The run folder, in which checkpoints, curves and logs are."""
        return self._job.run_folder.path

    @property
    def best(self) -> Mapping[str, Any]:
        """The evaluation with the best score so far: its metrics, ``update`` and ``epoch``. It is empty before the first, and saved.

        A script stops early with ``if epoch - session.best["epoch"] >= 3: break``.
        """
        return self._records.best

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
        ema: float | Mapping[str, Any] | None = None,
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
                the framework, which may return a scheduler of torch with it: (optimizer, scheduler). Of a model with a name, None means
                that no update changes it: a teacher or a target network.
            schedule: A curve such as ``mtrain.Cosine(warmup=100)``, or a function from update to learning rate.
            scheduler: In its place, a function that makes a scheduler of ``torch.optim.lr_scheduler`` from an optimizer, or one
                of ``paddle.optimizer.lr`` from a learning rate. The script steps it: ``optimizer.scheduler.step()``.
            clip_norm: Largest global L2 norm of the gradient.
            accumulate: Micro batches per update.
            ema: Decay of an exponential moving average of the weights, which is evaluated in their place; constant, unless a mapping
                ``{"decay": 0.999, "ramp": 2000}`` lets it rise as ``train.ema`` does.
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
        request = ModelRequest(
            build=build, optimizer=optimizer, schedule=schedule, scheduler=scheduler, clip_norm=clip_norm, accumulate=accumulate,
            ema=ema, precision=precision, sync_batchnorm=sync_batchnorm, freeze=freeze, seed=seed, name=name, overlap=overlap,
        )  # fmt: skip
        entry = self._prepared.add(request)
        return entry.model, entry.updater

    def keep(self, name: str, kept_object: Any, *, rows: int | None = None) -> None:
        """Save ``kept_object`` in checkpoints too, and restore it now if the job is resumed. Every rank must call, before the loop.

        It is an object with ``state_dict()`` and ``load_state_dict(state)``, or itself a dict, a list, an array, a tensor or a generator
        of torch, numpy or random. A state holds numbers, text, bytes, None, arrays, tensors and generators, and lists, tuples and dicts
        of these. A state that is equal on all ranks is saved once, and restored on any number of ranks. One that differs is saved for each
        rank, and restored on the same number of ranks.

        Args:
            name: Of its own for each object.
            kept_object: See above.
            rows: The axis along which the arrays of the state have a row for each sample of this rank in an update, in their order. They
                are saved as one array in the order of the global batch, and divided anew among any number of ranks.

        Raises:
            ScriptError: the object or its state cannot be kept, the name is taken, or there are ``rows`` and no model was prepared.
            CheckpointError: the checkpoint that is resumed has no state of this name, or that of another number of ranks.
        """
        self._records.kept.keep(name, kept_object, rows=rows, shares=self._prepared.shares)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch: int | BatchOf | Mapping[str, int] | tuple[int, ...] | None = None,
        epochs: int | None = None,
        updates: int | None = None,
        order: Order | None = None,
        shuffle: bool | None = None,
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
            shuffle: False: the samples come in the order of the data set; True: in mtrain's own. None: as the DataLoader says, else
                in mtrain's own.
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
        shares = self._prepared.check_trained("session.batches")
        if self._bodies is not None:
            raise ScriptError(
                "session.batches: called in the body of a loop over session.range, in which updates are made by session.updates; write "
                "session.epochs around session.batches"
            )
        if self._nested is not None:
            if epochs is not None or updates is not None:
                raise ScriptError(
                    "session.batches: a length given within a loop over session.epochs, which says the length; leave it out"
                )
            if shard is not None:
                raise ScriptError(
                    "session.batches: shard= given within a loop over session.epochs, but then the ranks may end an epoch after different "
                    "updates; leave shard= out, or session.epochs"
                )
            if self._loop is not None:
                return self._nested.again(dataset)
            epochs = self._nested.count
        if self._loop is not None:
            raise ScriptError(
                "session.batches: called twice; one session has one training loop. For a loop over epochs with code at the end of each, "
                "write `for epoch in session.epochs(10):` around `for batch in session.batches(loader):`"
            )
        given = GivenData(
            dataset=dataset, global_batch=global_batch, order=order, shuffle=shuffle, drop_last=drop_last, shard=shard,
            collate=collate, nondeterministic=nondeterministic, workers=workers,
        )  # fmt: skip
        changes = given.changes(epochs=epochs, updates=updates, outside_paths=self._job.outside_paths)
        spec = self._prepared.change(changes, call="session.batches")
        check_loop(spec, shares, divides=given.divides)
        with self._prepared.keep_draws():  # samples are read to check them
            reading = given.open(spec, shares, self._rank.capabilities.seed)
        loop = self._start(reading)
        return loop if self._nested is None else self._nested.start(loop, reading, dataset)

    def epochs(self, count: int | None = None, *, whole: bool = False) -> Iterator[int]:
        """Yield the numbers of the epochs, from where the job stands; the loop over ``batches`` is inside. Every rank must iterate.

        What follows the inner loop runs at the end of each epoch, with the state of the last update, and is not repeated by a resumed
        job: ``optimizer.scheduler.step()``, ``session.evaluate``, ``session.log``.

        Args:
            count: Number of epochs; None: as ``mtrain run --epochs`` says.
            whole: An epoch is made whole or not at all, as a body of ``range`` is, with what the script does before the inner loop:
                checkpoints are written at the ends of epochs alone.

        Raises:
            ScriptError: called twice, or after ``batches``.
        """
        if self._nested is not None or self._loop is not None or self._bodies is not None:
            raise ScriptError(
                "session.epochs: called after a loop over epochs or batches; one session has one training loop"
            )
        self._nested = Nested(count, self._seed_alike if whole else None)
        return self._nested.epochs(self.progress)

    def range(self, count: int) -> Iterator[int]:
        """Yield 0 to ``count`` - 1 in the outermost loop of a script, from where the job stands. Every rank must iterate.

        In its body are the script's own loops around ``session.updates``. A body is made whole or not at all: checkpoints are written at
        its end, and a job that was killed in a body begins it again. The generators of the framework, numpy and random are seeded at
        its begin and after each loop over ``updates``, alike on all ranks.

        Args:
            count: Number of bodies.

        Raises:
            ScriptError: there is a loop already, or the count is none.
        """
        if self._loop is not None or self._nested is not None or self._bodies is not None:
            raise ScriptError(
                "session.range: called after or within another loop; it is the outermost one, and those in its body are plain loops "
                "around session.updates"
            )
        _check_count("session.range", count)
        self._bodies = Bodies(count, self._seed_alike, is_trial=self._job.trial is not None)
        self._records.kept.keep("session.range", self._bodies)
        return self._bodies.numbers()

    def _seed_alike(self, place: str) -> None:
        """Seed the generators from which the script draws at a ``begin`` or ``within`` a body, alike on all ranks."""
        # Four numbers, where a sample has three, so that no sample has the same.
        key = (self._prepared.spec.train.seed, self.progress.update, 0, 1 + (place == "within"))
        seed_everything(None, key, self._rank.capabilities.seed)

    def updates(
        self, count: int | None = None, *, global_batch: int | None = None, total: int | None = None
    ) -> Iterator[int]:
        """Yield the numbers of the updates of a script that makes its batches itself, from where the job stands.

        Every rank must iterate, and make the same global batch in each update; ``share`` returns this rank's share of it. What the
        batches are made from, such as the memory of an agent and its environment, is saved by ``keep``.

        Args:
            count: Number of updates; None: as ``mtrain run`` says. In the body of a loop over ``range``, where it may be called as often
                as the script likes: those of this call, whose numbers begin at 0.
            global_batch: Samples per update over all ranks.
            total: In such a body: the updates of the whole job, for schedules and displays.

        Raises:
            ScriptError: there is a loop already, a number is missing, or a rank computes several parts of an update.
        """
        bodies = self._bodies
        if bodies is None:
            if total is not None:
                raise ScriptError(
                    "session.updates: total= given outside of a loop over session.range, where the count is the total"
                )
            return (self.progress.update for _ in self._start_made(count, global_batch))
        _check_count("session.updates", count)
        if bodies.loop is None:
            if total is None and "train.updates" not in self._job.outside_paths:
                raise ScriptError(
                    "session.updates: called in the body of a loop over session.range without total=; give the number of updates of the "
                    f"whole job too, such as session.updates({count}, total=100 * {count})"
                )
            bodies.loop, bodies.lengths = self._start_made(total, global_batch), (global_batch, total)
            bodies.loop.loop.holds = True
        elif bodies.lengths != (global_batch, total):
            raise ScriptError(
                "session.updates: another global_batch= or total= given than in the call before; both are those of the whole job"
            )
        return bodies.updates(count or 0)

    def _start_made(self, count: int | None, global_batch: int | None) -> ScriptLoop:
        """Start the loop of a script that makes its batches itself."""
        shares = self._prepared.check_trained("session.updates")
        if self._loop is not None or self._nested is not None:
            raise ScriptError("session.updates: called after another loop; one session has one training loop")
        changes = loop_changes(
            global_batch=global_batch, epochs=None, updates=count, outside_paths=self._job.outside_paths
        )
        spec = self._prepared.change(changes, call="session.updates")
        check_loop(spec, shares, divides=False)
        check_schedule(spec, "the script makes its batches itself")
        if shares.passes > 1:
            raise ScriptError(
                f"session.updates: this rank computes {shares.passes} parts of an update, and the script makes one batch; train with "
                "accumulate=1 and a rank for each shard"
            )
        return self._start(MadeBatches(spec.train.batch_size))

    def share(self, batch: Any) -> Any:
        """Return this rank's share of a global batch that the script has made alike on every rank, on the rank's device.

        Args:
            batch: Any nesting of tuples, lists and dicts of arrays and tensors, with ``global_batch`` rows each.

        Raises:
            ScriptError: called outside of a loop over ``updates``, or with another number of rows. Ranks that have made different
                batches are refused at the end of the update.
        """
        training = self._training
        if training is None or not isinstance(training.reading, MadeBatches) or training.loop.loop.micro is None:
            raise ScriptError("session.share: called outside of a loop over session.updates")
        return training.reading.share(batch, saw=training.tracing.saw_more)

    def _start(self, reading: Reading) -> ScriptLoop:
        """Start the training loop on ``reading``."""
        self._training = Training(self._prepared, reading, self._progress, stop=self._asked_to_end)
        return self._training.loop

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
            score: Name of the metric whose largest value marks the best checkpoint, or, as ``-error``, whose smallest one; None:
                ``score`` if there is one.

        Raises:
            ScriptError: the data set, the model's output or the metric's result cannot be used.
        """
        entry = self._prepared.models.of(model, call="session.evaluate")
        read = read_loader(dataset, call="session.evaluate")
        dataset, collate = evaluation_part(read), collate or read.collate
        check_dataset(dataset, call="session.evaluate")
        began = time.perf_counter()
        runner = evaluation.OutcomeStep(entry.module, step or evaluation.read_outputs)
        seed, seed_framework = self._prepared.spec.train.seed, self._rank.capabilities.seed
        join = collate or trees.collate

        def batch_of(indices: Sequence[int]) -> Any:
            with self._prepared.keep_draws():
                return join([seeded_sample(dataset, index, (seed, index), seed_framework) for index in indices])

        micro_batch = batch_size or read.batch or self._prepared.micro_batch
        order = evaluation.shares(len(dataset), self._rank.collective, micro_batch)
        # Every rank looks between micro batches whether one of them was asked to end, so that all stop evaluating together.
        holds = self._loop is not None and self._loop.loop.holds
        order = interruptible(
            order, collective=self._rank.collective, stop=(lambda: False) if holds else self._asked_to_end
        )
        try:
            results = evaluation.outcome(self._rank, entry, runner, order, batch_of, floats=self._prepared.floats)
        except Interrupted as error:
            if self._loop is None:
                raise
            self._loop.loop.interrupt()
            raise Interrupted(
                f"{error} after update {self.progress.update}, state saved; go on with --resume"
            ) from None
        metrics = evaluation.score(self._rank.collective, metric, *results)
        loop, progress = self._loop, self.progress
        best_score = self._records.report_evaluation(
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

    def _saw_gradients(self) -> None:
        if self._loop is not None:
            self._loop.saw_gradients()

    def backward(self, loss: Any, *, retain_graph: bool = False, reduction: str = "mean", weight: Any = None) -> None:
        """Add the gradients of a loss of the current micro batch to those of all models, as ``loss.backward()`` does.

        Call ``step`` of each optimizer afterwards. A loss of one model is given to ``optimizer.backward`` of that model.

        Args:
            loss: A single number with a gradient: the mean over the micro batch.
            retain_graph: Another loss is computed from the same graph afterwards.
            reduction: As for ``optimizer.update``.
            weight: Likewise.

        Raises:
            ScriptError: as for ``optimizer.update``.
        """
        updaters = [entry.updater for entry in self._prepared.models.with_optimizer]
        if not updaters:
            raise ScriptError("session.backward: called before session.prepare")
        # The graph is kept for all but the last model, each of which takes its own gradients of the loss.
        for updater in updaters:
            kept = retain_graph or updater is not updaters[-1]
            updater.backward(loss, retain_graph=kept, reduction=reduction, weight=weight)

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
        own, other = (self._prepared.models.of(model, call="session.follow") for model in (target, source))
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
        if not (self._nested or self._bodies) or not self._loop.has_ended:  # a comparison cuts an epoch or body short
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

    def _finish(self, reason: str) -> None:
        """Write what is left to write at the end; ``failed``: without the other ranks."""
        loop, stepped = self._loop, None
        # After `break`, too: the ranks agree that all have left after the same update, and save it.
        if reason == "done" and loop is not None:
            loop.leave()
            loop.loop.finish()
        if reason == "done" and len(self._prepared.models):
            stepped = self._prepared.models.as_stepped
        training = self._training
        self._records.end(
            reason,
            self.progress,
            spec=self._prepared.spec,
            total_updates=None if training is None else training.total_updates,
            stepped=stepped,
            measured=training.tracing.measure_ranks() if stepped is not None and training is not None else None,
        )


def _check_count(call: str, count: Any) -> None:
    """Refuse a length that is no number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ScriptError(f"{call}: {count!r} given; expected a number of at least 1, such as {call}(100)")
