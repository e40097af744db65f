"""Assemble a job from its spec on one rank: data, backend, model and optimizer. ``assemble`` has the order of the steps."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core import binding
from mtrain.core.collective import OneShardOnly
from mtrain.core.evaluate import Augmented, evaluate, interruptible, narrowing
from mtrain.core.interfaces import (
    Array,
    Backend,
    Collective,
    Evaluator,
    JobData,
    Loader,
    Model,
    Module,
    Optimizer,
    RankSession,
    Recipe,
    State,
    Task,
    TaskData,
)
from mtrain.core.network import pruned
from mtrain.core.network.noise import KeyedLoader
from mtrain.core.network.quantising import is_range
from mtrain.core.network.recomputing import blocks_to_compile, patterns
from mtrain.core.ranks.arithmetic import check_ranks
from mtrain.core.samples.sampler import Drawn, Padded, Shares, Shuffled
from mtrain.core.state.streams import stream_of
from mtrain.core.update.recipe import check_frozen, make_recipe, shares_of
from mtrain.core.update.schedule import total_updates
from mtrain.data.loader.in_process import InProcess, reads_in_process
from mtrain.data.loader.pool import WorkerPool
from mtrain.errors import LaunchError, SpecError
from mtrain.rank.spec import precision
from mtrain.rank.spec.drawn_weights import DrawnWeights
from mtrain.rank.spec.draws import DrawingLoader, Draws
from mtrain.rank.spec.teaching import attach
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved
from mtrain.system import placement
from mtrain.tasks.base import TaskBase
from mtrain.tasks.datasets import open_data
from mtrain.weights.matching import Match, entry_types, match, refuse_nothing
from mtrain.weights.reading import read

log = logging.getLogger(__name__)
AHEAD_SHARE = 1 / 16
"""Share of the available memory that the batches which all ranks of a host prepare ahead may take, each of the splits."""
LOADER_BYTES = 192 << 20
"""Memory that is reckoned for a loader process: 50 MB of its own, and images of a few megapixels."""


@dataclass(frozen=True, kw_only=True)
class Entered:
    """A job on one rank whose backend is entered, and whose model is not built yet."""

    resolved: Resolved
    data: JobData
    pool: WorkerPool | InProcess
    backend: Backend
    session: RankSession
    plugin: Model


@dataclass(frozen=True, kw_only=True)
class Assembly(Entered):
    """An assembled job on one rank, which exists as long as its session."""

    recipe: Recipe
    task: Task
    model: Module
    optimizer: Optimizer
    teacher: str | None = None
    """Digest of the weights of the model that is imitated; None if there is none."""
    decided: list[Any] | None = None
    """What predictions have decided in micro batches, for the trace; see ``models.common.imitation.Imitator``."""
    messages: Sequence[tuple[str, str]] = ()
    """Messages about choices and start weights for the report: (``note`` or ``warning``, a sentence)."""

    @property
    def spec(self) -> Spec:
        """Return the spec of the job."""
        return self.resolved.spec

    def training_order(self) -> Shuffled:
        """Return the order that assigns samples to updates."""
        return Shuffled(self.data.length("train"), global_batch=self.spec.train.batch_size, seed=self.spec.train.seed)

    @property
    def shares(self) -> Shares:
        """Return which shards of an update this rank computes."""
        return shares_of(self.recipe, self.session.collective)

    def draws(self, data: TaskData) -> Draws | None:
        """Return how samples are drawn by weights; None: each is trained once an epoch."""
        if data.sample_weights({}) is None:
            return None
        train = self.spec.train
        return Draws(data, Drawn(data.length("train"), global_batch=train.batch_size, seed=train.seed))

    def training_loader(self, draws: Draws | None = None) -> Loader:
        """Make the loader of this rank's micro batches for training; with ``draws``, of samples drawn by weights."""
        order = self.training_order() if draws is None else draws.order
        shares, recipe = self.shares, self.recipe

        def indices(epoch: int, update: int) -> list[Any]:
            return shares.divide(order.global_batch_indices(epoch, update))

        loader: Loader = self.pool.loader(
            "train",
            indices,
            micro_batch=recipe.micro_batch,
            accumulate=recipe.accumulate,
            updates_per_epoch=order.updates_per_epoch,
            prefetch=self.spec.data.prefetch,
            # Weights of the next epoch are known after an evaluation, so nothing of it is prepared before.
            epochs=0 if draws else -(-total_updates(self.spec, order.updates_per_epoch) // order.updates_per_epoch),
        )
        if draws is not None:
            loader = DrawingLoader(loader, draws)
        if self.plugin.native:
            return loader  # a user's own model gets its own batch and nothing else
        places = shares.divide(np.arange(self.spec.train.batch_size))
        return KeyedLoader(loader, places, seed=self.spec.train.seed)

    def evaluation_loader(self) -> Loader:
        """Make the loader of this rank's micro batches for evaluation.

        Every rank gets equally many, and every sample occurs at least once.
        """
        collective = self.session.collective
        micro = self.spec.evaluate.batch_size or self.recipe.micro_batch
        size = self.recipe.data_size(collective.size)
        order = Padded(self.data.length("val"), size=size, micro_batch=micro)
        shares = list(order.micro_batches(self.recipe.data_rank(collective.rank)))
        return self.pool.loader(
            "val",
            lambda epoch, update: [shares[update]],
            micro_batch=micro,
            accumulate=1,
            updates_per_epoch=order.batches_per_rank,
            prefetch=self.spec.data.prefetch,
        )

    def evaluate(self, loader: Loader, evaluator: Evaluator, *, stop: Callable[[], bool]) -> dict[str, float]:
        """Score the averaged weights, see ``core.evaluate``; every rank must call. ``stop``: somebody asks for the end."""
        return evaluate(
            self.session,
            self.model,
            self.optimizer,
            interruptible(loader.micro_batches(0), collective=self.session.collective, stop=stop),
            predictions=self.plugin.predictions,
            evaluator=evaluator,
            augmented=make_augmented(self.resolved),
            narrow=narrowing(self.session, self.plugin.narrowed),
        )


def check_device(spec: Spec, backend: Backend, session: RankSession) -> None:
    """Refuse the CPU if GPUs were requested by number: a framework without CUDA would silently train on the CPU.

    Raises:
        LaunchError: This rank's framework sees no GPU.
    """
    numbers, option = spec.cluster.devices, spec.backend.options.get("device")
    if numbers and option != "cpu" and session.device == "cpu":
        raise LaunchError(
            f"cluster.devices: {numbers} given, but {backend.framework} sees no GPU here; install its build for CUDA "
            "(docs/versions.md#gpus), or train on the CPU with --devices cpu"
        )


def find_unused_gpus(spec: Spec, backend: Backend, session: RankSession, environ: Mapping[str, str]) -> str:
    """Return a warning if a rank computes on the CPU of a host with GPUs without being asked to; else an empty text."""
    count = placement.count_devices(environ)
    if not count or spec.backend.options.get("device", "auto") != "auto" or session.device != "cpu":
        return ""
    return (
        f"this host has {count} GPU{'s' if count > 1 else ''}, but {backend.framework} sees none and computes on the CPU; "
        "install its build for CUDA (docs/versions.md#gpus), or say that this is meant with --devices cpu"
    )


@contextmanager
def assemble(
    resolved: Resolved,
    data: JobData,
    *,
    leave: Callable[[BaseException], None],
    details: Mapping[str, Any] | None = None,
    training: bool = False,
    restored: bool = False,
) -> Iterator[Assembly]:
    """Assemble the job of ``resolved`` on this rank, with start weights in the model; every rank must call.

    Args:
        resolved: The spec and its plugins.
        data: The task's data, see ``open_task``, or images to predict on.
        leave: Records an error, see ``process.Leaving``.
        details: Details of the task from a checkpoint; None: they are computed from the data.
        training: Whether the job trains. Entries that are computed from its data then win over those of
            ``model.weights``.
        restored: The caller restores a checkpoint, so ``model.weights`` is not read.

    Raises:
        UsageError: The spec, the data or a plugin does not allow the job.
    """
    if training:
        check_settled(resolved.spec)
    # First the data, and the fork of the loader's processes, before the framework computes anything: nothing of its threads and
    # devices, which do not survive a fork, is there yet.
    sources = data.sources()
    pool = InProcess(sources) if reads_in_process(sources) else made_pool(sources, resolved.spec)
    with closing(pool):
        backend, plugin = resolved.backend, resolved.model
        plugin.check_framework(backend.framework)
        # Here the framework is imported, unless this process is a copy of one that has it.
        binding.bind(backend.nn, backend.ops)
        # The ranks meet when the backend is entered; an error is recorded before it is left, so before other ranks notice.
        with backend as session, _left_by(leave):
            check_ranks(session, backend=backend, name=resolved.spec.backend.name)
            if resolved.spec.report.times_waits:
                session.capabilities.time_waits()
            check_device(resolved.spec, backend, session)
            # Only now all devices are known, on which the choice depends. Recipe and model are made of what was chosen.
            spec, choices = precision.settle(resolved.spec, session)
            entered = Entered(
                resolved=resolved.with_spec(spec), data=data, pool=pool, backend=backend, session=session, plugin=plugin
            )
            assembly = _prepare(entered, details=details, training=training)
            weights_file = None if restored else spec.model.weights
            messages = start(assembly, weights_file=weights_file, training=training)
            yield replace(assembly, messages=[*choices, *messages])


def _prepare(entered: Entered, *, details: Mapping[str, Any] | None, training: bool) -> Assembly:
    """Build model and optimizer in an entered backend; every rank must call. See ``assemble`` for the arguments."""
    spec, data, plugin, session = entered.resolved.spec, entered.data, entered.plugin, entered.session
    recipe = replace(
        make_recipe(spec, size=session.collective.size),
        own_model=plugin.native,
        recompute=blocks_to_recompute(spec, plugin),
        compile_blocks=blocks_to_compile(spec.train, plugin.recomputable, model=spec.model.name),
    )
    task = data.task()
    task = plugin.prepare_task(task, data.statistics()) if details is None else replace(task, details=details)
    # A rank that computes several shards one after the other cannot exchange values between them in the middle of a pass.
    several = training and recipe.shards not in (None, recipe.data_size(session.collective.size))
    given: Collective = OneShardOnly(session.collective) if several else session.collective
    built: list[Module] = []

    def build() -> Module:
        built.append(pruned.build(plugin, task, given, spec.model.pruned))
        if spec.report.trace == "state" and not plugin.native and hasattr(built[0], "decided"):
            built[0].decided = []
        return built[0]

    model, optimizer = session.prepare(build, recipe)
    # After the model, on whose device the teacher's weights are placed.
    teacher = attach(entered.resolved, built[0], data, session.collective) if training else None
    if isinstance(data, TaskBase):
        data.entered(collective=session.collective, seed_framework=session.capabilities.seed)
    return Assembly(
        **vars(entered),
        recipe=recipe,
        task=task,
        model=model,
        optimizer=optimizer,
        teacher=teacher,
        decided=None if plugin.native else getattr(built[0], "decided", None),
    )


@contextmanager
def _left_by(leave: Callable[[BaseException], None]) -> Iterator[None]:
    """Record an exception with ``leave`` before it leaves the backend's context."""
    try:
        yield
    except BaseException as error:
        leave(error)
        raise


def open_task(resolved: Resolved, *, training: bool = True, for_model: bool = True) -> TaskData:
    """Open the data set of ``resolved`` as the model's task; its content is read when it is first needed.

    Args:
        resolved: The spec and its plugins.
        training: Whether the training split is read, too.
        for_model: Whether the model must be of the data set's kind.

    Raises:
        SpecError: Data set and model are of different kinds, or the kind does not support a setting of ``data``.
        PluginError: Data set or model are unknown.
    """
    opened = open_data(resolved.spec.data, registry=resolved.registry)
    if for_model:
        resolved.check_kinds(opened.kind)
    return resolved.task_named(opened.kind)(resolved.spec, opened, training=training)


def made_pool(sources: Mapping[str, Any], spec: Spec) -> WorkerPool:
    """Fork the loader processes of this rank."""
    from mtrain.spec.bounds import available_bytes

    ahead_bytes = int(available_bytes() * AHEAD_SHARE) // local_ranks(spec)
    return WorkerPool(sources, workers=loader_workers(spec), ahead_bytes=ahead_bytes)


def loader_workers(spec: Spec) -> int:
    """Return the number of loader processes of one rank."""
    from mtrain.spec.bounds import available_bytes
    from mtrain.system.placement import usable_cores

    if spec.data.workers != "auto":
        return spec.data.workers
    # The host's cores are shared among its ranks, and one is left for each rank itself. Together the processes take up to half
    # of the memory: the other half is for the ranks.
    ranks = local_ranks(spec)
    by_memory = available_bytes() // 2 // ranks // LOADER_BYTES
    return max(min(usable_cores() // ranks - 1, by_memory), 1)


def local_ranks(spec: Spec) -> int:
    """Return the number of ranks on this host."""
    return spec.cluster.nproc_per_node if isinstance(spec.cluster.nproc_per_node, int) else 1


def start(assembly: Assembly, *, weights_file: str | None, training: bool) -> list[tuple[str, str]]:
    """Put start weights into the model: random ones keyed by (seed, name), overwritten by those of ``weights_file``.

    Returns:
        Messages about the file, see ``Assembly.messages``.

    Raises:
        CheckpointError: The file of ``model.weights`` cannot be read.
        SpecError: No array of it fits.
    """
    session, spec = assembly.session, assembly.spec
    outlines = stream_of(session, assembly.model, assembly.optimizer, copied=False).outlines["weights"]
    shapes = {name: outline.shape for name, outline in outlines.items()}
    check_frozen(shapes, assembly.recipe.frozen)
    if assembly.plugin.native and weights_file is None:
        return []  # the module's own start values, which the session has compared over the ranks
    start_weights = StartWeights(
        spec=spec,
        plugin=assembly.plugin,
        task=assembly.task,
        shapes=shapes,
        built=session.state(assembly.model, assembly.optimizer).weights if assembly.plugin.native else None,
    )
    weights, messages = start_weights.make(weights_file=weights_file, training=training)
    for kind, sentence in messages:
        log.log(logging.WARNING if kind == "warning" else logging.INFO, "%s", sentence)
    session.restore(assembly.model, assembly.optimizer, State(weights=weights))
    return messages


@dataclass(frozen=True, kw_only=True)
class StartWeights:
    """Everything that determines the start weights of a job; needs no framework."""

    spec: Spec
    plugin: Model
    task: Task
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the model's state, by name."""
    built: Mapping[str, Array] | None = None
    """The start values of a user's native module; None: the plugin draws them."""

    def make(self, *, weights_file: str | None, training: bool) -> tuple[Mapping[str, Array], list[tuple[str, str]]]:
        """Make random values keyed by (seed, name), overwritten by the arrays of ``weights_file``.

        Returns:
            The weights by name, and messages about the file, see ``Assembly.messages``.

        Raises:
            CheckpointError: The file cannot be read.
            SpecError: No array of it fits.
        """
        weights: Mapping[str, Array] = DrawnWeights(self.plugin, self.task, self.shapes, seed=self.spec.train.seed)
        if self.built is not None:
            ranges = {name: np.zeros(shape, np.float32) for name, shape in self.shapes.items() if is_range(name)}
            weights = {**self.built, **ranges}
        if weights_file is None:
            return weights, []
        weights = dict(weights)
        own = weights if training else None
        result = refuse_nothing(
            given_weights(Path(weights_file), weights, self.plugin, own=own, key=self.spec.model.weights_key)
        )
        messages = [("note", f"model.weights: {result.summary()}")]
        messages += [("warning", f"model.weights: {sentence}") for sentence in result.warnings()]
        # A job that trains observes its own ranges, from the update that its spec names.
        matched = {name: array for name, array in result.matched.items() if not (training and is_range(name))}
        return {**weights, **matched}, messages


def given_weights(
    path: Path,
    state: Mapping[str, Array],
    plugin: Model,
    *,
    own: Mapping[str, Array] | None = None,
    key: str | None = None,
) -> Match:
    """Match the weights at ``path`` with a model whose weights are ``state``, see ``weights.matching.match``.

    ``key``: which of several sets of weights is meant, see ``weights.reading.read``.

    Raises:
        CheckpointError: The weights cannot be read.
    """
    return match(read(path, key=key), entry_types(state), plugin.published, own=own)


def check_settled(spec: Spec) -> None:
    """Refuse a job that trains before ``train.max_micro_batch: auto`` was decided.

    Raises:
        SpecError: It was not.
    """
    if spec.train.max_micro_batch == "auto":
        raise SpecError(
            "train.max_micro_batch: auto is decided where `mtrain train` starts a job, and not by this command; give a number "
            "or null"
        )


def blocks_to_recompute(spec: Spec, plugin: Model) -> tuple[str, ...]:
    """Return ``Recipe.recompute`` of the job, having checked ``train.compile`` too.

    Raises:
        SpecError: The model names no blocks, and the spec none of its submodules.
    """
    blocks_to_compile(spec.train, plugin.recomputable, model=spec.model.name)
    return patterns(spec.train, plugin.recomputable, model=spec.model.name)


def make_augmented(resolved: Resolved) -> Augmented | None:
    """Return how samples are varied for evaluation and prediction; None: the spec does not ask for it.

    Raises:
        SpecError: The model cannot join the outputs of varied copies, or its task varies nothing.
    """
    spec = resolved.spec
    if not spec.evaluate.augment:
        return None
    plugin = resolved.model
    if type(plugin).joined is Model.joined:
        raise SpecError(
            f"evaluate.augment: true, but {spec.model.name} cannot join what it predicts for varied copies; set it to false"
        )
    kind = resolved.task_named(plugin.kind)
    return Augmented(varied=lambda batch: kind.varied(batch, step=plugin.size_step), joined=plugin.joined)
