"""Spec to job: data, backend, model, optimizer put together. Used by a rank alone; the order of the steps matters and is said here.

1. The data set opens and the loader's processes are forked while this process is still small and has one thread.
2. The backend loads its framework, ``core.nn`` and ``core.ops`` are bound.
3. Inside ``with backend:`` the model is built, the recipe bound, start weights put in.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain.core import binding
from mtrain.core.interfaces import (
    Array,
    Backend,
    JobData,
    Loader,
    Model,
    Module,
    Optimizer,
    Recipe,
    State,
    Task,
    TaskData,
    TaskKind,
)
from mtrain.core.recipe import check_frozen, make_recipe
from mtrain.core.sampler import Padded, Shuffled, rank_share
from mtrain.core.schedule import total_updates
from mtrain.data.loader.pool import WorkerPool
from mtrain.errors import LaunchError, PluginError, SpecError
from mtrain.spec import plugins
from mtrain.spec.model import Spec
from mtrain.system import placement
from mtrain.tasks.classification.task import ClassificationTask
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.task import DetectionTask
from mtrain.weights.matching import Match, match, refuse_nothing, wanted_of
from mtrain.weights.names import published_of
from mtrain.weights.reading import read

TASKS: Mapping[str, TaskKind] = {"detection": DetectionTask, "classification": ClassificationTask}
"""What the ``kind`` of a data set and of a model means for the job."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A job put together, on one rank, inside ``with backend:``."""

    spec: Spec
    data: JobData
    pool: WorkerPool
    backend: Backend
    recipe: Recipe
    plugin: Model
    task: Task
    model: Module
    optimizer: Optimizer
    told: Sequence[tuple[str, str]] = ()
    """Records about the start weights: ``note`` or ``warning``, and a sentence."""

    def training_order(self) -> Shuffled:
        """Which samples each update takes."""
        return Shuffled(self.data.length("train"), global_batch=self.spec.train.batch_size, seed=self.spec.train.seed)

    def training_loader(self) -> Loader:
        """Micro batches of this rank for training."""
        order, collective, recipe = self.training_order(), self.backend.collective, self.recipe

        def indices(epoch: int, update: int) -> list[Any]:
            batch = order.global_batch_indices(epoch, update)
            return rank_share(batch, rank=collective.rank, size=collective.size, accumulate=recipe.accumulate)

        return self.pool.loader(
            "train",
            indices,
            micro_batch=recipe.micro_batch,
            accumulate=recipe.accumulate,
            updates_per_epoch=order.updates_per_epoch,
            prefetch=self.spec.data.prefetch,
            epochs=-(-total_updates(self.spec, order.updates_per_epoch) // order.updates_per_epoch),
        )

    def evaluation_loader(self) -> Loader:
        """Micro batches of this rank for evaluation: as many on every rank, each sample at least once."""
        collective = self.backend.collective
        micro = self.spec.evaluate.batch_size or self.recipe.micro_batch
        order = Padded(self.data.length("val"), size=collective.size, micro_batch=micro)
        shares = list(order.micro_batches(collective.rank))
        return self.pool.loader(
            "val",
            lambda epoch, update: [shares[update]],
            micro_batch=micro,
            accumulate=1,
            updates_per_epoch=order.batches_per_rank,
            prefetch=self.spec.data.prefetch,
        )


def check_device(spec: Spec, backend: Backend) -> None:
    """Refuse the CPU where GPUs were asked for by number: a framework without CUDA would train there in silence.

    Raises:
        LaunchError: this rank's framework sees none of them.
    """
    numbers, option = spec.cluster.devices, spec.backend.options.get("device")
    if numbers and option != "cpu" and backend.device == "cpu":
        raise LaunchError(
            f"cluster.devices: {numbers} given, but {backend.framework} sees no GPU here; install its build for CUDA "
            "(docs/gpu.md), or train on the CPU with --devices cpu"
        )


def unused_gpus(spec: Spec, backend: Backend, environ: Mapping[str, str]) -> str:
    """A warning where a rank computes on the CPU of a host with GPUs and nobody asked for that; else empty."""
    count = placement.count_devices(environ)
    if not count or spec.backend.options.get("device", "auto") != "auto" or backend.device != "cpu":
        return ""
    return (
        f"this host has {count} GPU{'s' if count > 1 else ''}, but {backend.framework} sees none and computes on the CPU; "
        "install its build for CUDA (docs/gpu.md), or say that this is meant with --devices cpu"
    )


@contextmanager
def assembled(
    spec: Spec,
    data: JobData,
    *,
    leave: Callable[[BaseException], None],
    details: Mapping[str, Any] | None = None,
    training: bool = False,
    restored: bool = False,
) -> Iterator[Assembly]:
    """The job of ``spec`` on this rank; start weights are in the model. Every rank calls.

    Args:
        spec: the resolved spec.
        data: see ``open_task``, or pictures to predict on.
        leave: takes an error while the backend is still entered, so before other ranks notice: see ``rank.Leaving``.
        details: of a task that was prepared before (a checkpoint's); None: from the data.
        training: what comes from the data of this job is kept where ``model.weights`` has it otherwise.
        restored: the caller puts a checkpoint in, so ``model.weights`` is not asked for.

    Raises:
        UsageError: the spec, the data or a plugin does not allow the job.
    """
    pool = WorkerPool(data.sources(), workers=loader_workers(spec))
    with closing(pool):
        backend: Backend = _plugin(spec, "backends", spec.backend.name, spec.backend.options, path="backend.options")
        binding.bind(backend.nn, backend.ops)
        with backend, _left_by(leave):
            if spec.report.trace == "traffic" and hasattr(backend, "time_waits"):
                backend.time_waits()
            check_device(spec, backend)
            recipe = make_recipe(spec, size=backend.collective.size)
            plugin = model_plugin(spec)
            task = data.task()
            task = plugin.prepare_task(task, data.statistics()) if details is None else replace(task, details=details)
            model, optimizer = backend.prepare(lambda: plugin.build(task, backend.collective), recipe)
            assembly = Assembly(
                spec=spec,
                data=data,
                pool=pool,
                backend=backend,
                recipe=recipe,
                plugin=plugin,
                task=task,
                model=model,
                optimizer=optimizer,
            )
            given = None if restored else spec.model.weights
            yield replace(assembly, told=start(assembly, given=given, training=training))


@contextmanager
def _left_by(leave: Callable[[BaseException], None]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        leave(error)
        raise


def open_task(spec: Spec, *, training: bool = True) -> TaskData:
    """The data set of ``spec`` as a job sees it. Nothing is read before it is asked for.

    Raises:
        SpecError: data set and model are of different kinds, or the kind cannot do what ``data`` says.
        PluginError: data set or model are unknown.
    """
    opened = open_data(spec.data, policy=plugins.read_policy(spec.plugins))
    wanted = model_plugin(spec).kind
    if opened.kind != wanted:
        raise SpecError(
            f"data.format: {spec.data.format} is a data set for {opened.kind}, but model.name: {spec.model.name} is for "
            f"{wanted}; change one of them"
        )
    return task_kind(opened.kind)(spec, opened, training=training)


def open_data_of(spec: Spec) -> TaskData:
    """The data set of ``spec`` by itself, whatever the model is.

    Raises:
        UsageError: as ``open_task``.
    """
    opened = open_data(spec.data, policy=plugins.read_policy(spec.plugins))
    return task_kind(opened.kind)(spec, opened)


def task_kind(kind: str) -> TaskKind:
    """The kind of task of a plugin.

    Raises:
        PluginError: no such kind is known.
    """
    if kind not in TASKS:
        raise PluginError(f"a plugin is for tasks of the kind {kind!r}; known kinds: {', '.join(TASKS)}")
    return TASKS[kind]


def model_plugin(spec: Spec) -> Model:
    """The model plugin of ``spec`` with its options checked.

    A model that selects its predictions keeps at least as many of a picture as ``evaluate.max_detections`` asks for.
    """
    options, wanted = spec.model.options, spec.evaluate.max_detections
    policy = plugins.read_policy(spec.plugins)
    known = plugins.load("models", spec.model.name, policy=policy).Options.model_fields.get("max_detections")
    if known is not None and "max_detections" not in options and known.default < wanted:
        options = {**options, "max_detections": wanted}
    plugin: Model = _plugin(spec, "models", spec.model.name, options, path="model.options")
    return plugin


def _plugin(spec: Spec, kind: str, name: str, given: Mapping[str, Any], *, path: str) -> Any:
    """A plugin constructed with its options, as the ``plugins.toml`` of the spec allows."""
    policy = plugins.read_policy(spec.plugins)
    options = plugins.options(kind, name, given, path=path, policy=policy)
    return plugins.load(kind, name, policy=policy)(options)


def loader_workers(spec: Spec) -> int:
    """Loader processes of one rank; ``auto``: what the cores leave for each rank, from 1 to 8."""
    from mtrain.system.placement import usable_cores

    if spec.data.workers != "auto":
        return spec.data.workers
    ranks = spec.cluster.nproc_per_node if isinstance(spec.cluster.nproc_per_node, int) else 1
    return min(max(usable_cores() // ranks - 1, 1), 8)


def start(assembly: Assembly, *, given: str | None, training: bool) -> list[tuple[str, str]]:
    """Give the model its start weights: keyed by (seed, name), then what the file ``given`` has. Returns what is to be told.

    Raises:
        CheckpointError: the file of ``model.weights`` cannot be read.
        SpecError: nothing of it fits.
    """
    backend, spec = assembly.backend, assembly.spec
    shapes = {
        name: tuple(array.shape) for name, array in backend.state(assembly.model, assembly.optimizer).weights.items()
    }
    check_frozen(shapes, assembly.recipe.frozen)
    found = StartWeights(spec=spec, plugin=assembly.plugin, task=assembly.task, shapes=shapes)
    weights, told = found.make(given=given, training=training)
    for kind, sentence in told:
        log.log(logging.WARNING if kind == "warning" else logging.INFO, "%s", sentence)
    backend.restore(assembly.model, assembly.optimizer, State(weights=weights))
    return told


@dataclass(frozen=True, kw_only=True)
class StartWeights:
    """What the start weights of a job follow from; needs no framework."""

    spec: Spec
    plugin: Model
    task: Task
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's state, by name."""

    def make(self, *, given: str | None, training: bool) -> tuple[dict[str, Array], list[tuple[str, str]]]:
        """Values keyed by (seed, name), then what the file ``given`` has; and records about that file.

        Raises:
            CheckpointError: the file cannot be read.
            SpecError: nothing of it fits.
        """
        weights = self.plugin.initial(self.shapes, self.task, seed=self.spec.train.seed)
        if given is None:
            return weights, []
        own = weights if training else None
        found = refuse_nothing(given_weights(Path(given), weights, self.plugin, own=own))
        told = [("note", f"model.weights: {found.summary()}")]
        told += [("warning", f"model.weights: {sentence}") for sentence in found.warnings()]
        return {**weights, **found.taken}, told


def given_weights(
    path: Path, held: Mapping[str, Array], plugin: Model, *, own: Mapping[str, Array] | None = None
) -> Match:
    """The weights at ``path`` against a model whose state is ``held``; see ``weights.matching.match``.

    Raises:
        CheckpointError: they cannot be read.
    """
    return match(read(path), wanted_of(held), published_of(plugin), own=own)
