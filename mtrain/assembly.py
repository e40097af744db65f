"""Spec to job: data, backend, model, optimizer put together. Used by a rank alone; the order of the steps matters and is said here.

1. The data set opens and the loader's processes are forked while this process is still small and has one thread.
2. The backend loads its framework, ``core.nn`` and ``core.ops`` are bound.
3. Inside ``with backend:`` the model is built, the recipe bound, start weights put in.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain.core import binding, plugins
from mtrain.core.errors import CheckpointError, SpecError
from mtrain.core.interfaces import Array, Backend, Loader, Model, Module, Optimizer, Recipe, State, Task
from mtrain.core.optimizer import check_frozen, make_recipe
from mtrain.core.sampler import Padded, Shuffled, rank_share
from mtrain.core.schedule import total_updates
from mtrain.core.spec import Spec
from mtrain.data import open_data
from mtrain.data.detection import DetectionTask, PictureTask
from mtrain.data.loading import WorkerPool

TASKS = {"detection": DetectionTask}
"""What a data set's ``kind`` means for the job."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A job put together, on one rank, inside ``with backend:``."""

    spec: Spec
    data: DetectionTask | PictureTask
    pool: WorkerPool
    backend: Backend
    recipe: Recipe
    plugin: Model
    task: Task
    model: Module
    optimizer: Optimizer

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


@contextmanager
def assembled(
    spec: Spec,
    data: DetectionTask | PictureTask,
    *,
    leave: Callable[[BaseException], None],
    details: Mapping[str, Any] | None = None,
) -> Iterator[Assembly]:
    """The job of ``spec`` on this rank; start weights are in the model. Every rank calls.

    Args:
        spec: the resolved spec.
        data: see ``open_task``.
        leave: takes an error while the backend is still entered, so before other ranks notice: see ``rank.Leaving``.
        details: of a task that was prepared before (a checkpoint's); None: from the data.

    Raises:
        UsageError: the spec, the data or a plugin does not allow the job.
    """
    pool = WorkerPool(data.sources(), workers=loader_workers(spec))
    with closing(pool):
        backend: Backend = _plugin(spec, "backends", spec.backend.name, spec.backend.options, path="backend.options")
        binding.bind(backend.nn, backend.ops)
        with backend, _left_by(leave):
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
            start(assembly)
            yield assembly


@contextmanager
def _left_by(leave: Callable[[BaseException], None]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        leave(error)
        raise


def open_task(spec: Spec, *, training: bool = True) -> DetectionTask:
    """The data set of ``spec`` as a job sees it.

    Raises:
        SpecError: data set and model are of different kinds.
        UsageError: the data set cannot be opened.
    """
    opened = open_data(spec.data, policy=plugins.read_policy(spec.plugins))
    wanted = model_plugin(spec).kind
    if opened.kind != wanted:
        raise SpecError(
            f"data.format: {spec.data.format} is a data set for {opened.kind}, but model.name: {spec.model.name} is for "
            f"{wanted}"
        )
    return TASKS[opened.kind](spec, opened, training=training)


def model_plugin(spec: Spec) -> Model:
    """The model plugin of ``spec`` with its options checked."""
    plugin: Model = _plugin(spec, "models", spec.model.name, spec.model.options, path="model.options")
    return plugin


def _plugin(spec: Spec, kind: str, name: str, given: Mapping[str, Any], *, path: str) -> Any:
    """A plugin constructed with its options, as the ``plugins.toml`` of the spec allows."""
    policy = plugins.read_policy(spec.plugins)
    options = plugins.options(kind, name, given, path=path, policy=policy)
    return plugins.load(kind, name, policy=policy)(options)


def loader_workers(spec: Spec) -> int:
    """Loader processes of one rank; ``auto``: what the cores leave for each rank, from 1 to 8."""
    from mtrain.core.placement import usable_cores

    if spec.data.workers != "auto":
        return spec.data.workers
    ranks = spec.cluster.nproc_per_node if isinstance(spec.cluster.nproc_per_node, int) else 1
    return min(max(usable_cores() // ranks - 1, 1), 8)


def start(assembly: Assembly) -> None:
    """Give the model its start weights: keyed by (seed, name), then what ``model.weights`` has."""
    backend, spec = assembly.backend, assembly.spec
    shapes = {
        name: tuple(array.shape) for name, array in backend.state(assembly.model, assembly.optimizer).weights.items()
    }
    check_frozen(shapes, assembly.recipe.frozen)
    weights = assembly.plugin.initial(shapes, assembly.task, seed=spec.train.seed)
    if spec.model.weights is not None:
        weights |= matching(read_weights(Path(spec.model.weights)), weights)
    backend.restore(assembly.model, assembly.optimizer, State(weights=weights))


def read_weights(path: Path) -> dict[str, Array]:
    """Arrays of a safetensors file, or of a checkpoint folder (its averaged weights where it has them).

    Raises:
        CheckpointError: there is nothing readable at ``path``.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    candidates = [path / "ema.safetensors", path / "weights.safetensors"] if path.is_dir() else [path]
    try:
        loaded = [load_file(file) for file in candidates if file.exists()]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"model.weights: {path} cannot be read ({error}); expected a safetensors file") from error
    if not loaded:
        raise CheckpointError(
            f"model.weights: {path} does not exist; expected a safetensors file or a checkpoint folder"
        )
    merged: dict[str, Array] = {}
    for arrays in reversed(loaded):
        merged |= {name.removeprefix("/"): array for name, array in arrays.items()}
    return merged


def matching(given: Mapping[str, Array], wanted: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of ``given`` that fit by name and shape, in the type wanted; what does not fit is logged with its reason.

    Raises:
        SpecError: nothing fits.
    """
    fitting = {name: given[name].astype(wanted[name].dtype) for name in wanted if _fits(name, given, wanted)}
    if not fitting:
        raise SpecError("model.weights: no array of the file fits the model by name and shape; is it of another model?")
    left = [name for name in wanted if name not in fitting]
    for name in left:
        reason = f"its shape there is {tuple(given[name].shape)}" if name in given else "the file does not have it"
        log.warning("model.weights: %s keeps its start value %s: %s", name, tuple(wanted[name].shape), reason)
    log.info("model.weights: %d of %d arrays taken", len(fitting), len(wanted))
    return fitting


def _fits(name: str, given: Mapping[str, Array], wanted: Mapping[str, Array]) -> bool:
    return name in given and given[name].shape == wanted[name].shape
