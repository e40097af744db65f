"""mtrain's torch engine over FSDP2: it splits the model over ranks, trains the parts, and saves whole arrays."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from mtrain.backends.torch_engine import (
    Exchange,
    ShardedOptimizer,
    TorchCollective,
    TorchEngine,
    TorchOptimizer,
    fill,
    to_numpy,
    use_channels_last,
)
from mtrain.core import state_checks
from mtrain.core.interfaces import Array, Recipe, State
from mtrain.core.quantising import fitted
from mtrain.errors import SpecError

Unit = Literal["model", "children"]


class FsdpEngine(TorchEngine):
    """One rank of a job on FSDP2. ``prepare`` returns the model that was built, with FSDP's hooks on it."""

    def __init__(self, collective: TorchCollective, target: torch.device, *, unit: Unit) -> None:
        super().__init__(collective, target)
        self._unit = unit
        self._channels_last = False
        self._mesh: DeviceMesh | None = init_device_mesh(target.type, (collective.size,))

    @override
    def prepare(self, build: Callable[[], nn.Module], recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        if recipe.compile:
            raise SpecError("train.compile: true given with backend fsdp; use false")
        # FSDP takes contiguous weights only, so each convolution converts its weight to channels last when it is
        # called.
        self._channels_last = recipe.channels_last
        return super().prepare(build, replace(recipe, channels_last=False))

    @override
    def wrap(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        """Split ``model`` over ranks, in place."""
        if self._channels_last:
            use_channels_last(model)
        for unit in [*(_units(model, _places(model)) if self._unit == "children" else ()), model]:
            # Resharding after each use means that no whole copy survives: a change to the parts takes effect at the
            # next use.
            fully_shard(unit, mesh=self._mesh, reshard_after_forward=True)
        return model, Parts(model)

    @override
    def optimizer(self, model: nn.Module, recipe: Recipe, exchange: Exchange) -> TorchOptimizer:
        assert isinstance(exchange, Parts)
        recipe = replace(recipe, channels_last=self._channels_last)
        return ShardedOptimizer(
            model, recipe, parts=exchange.held, exchange=exchange, collective=self.collective, device=self.target
        )

    @override
    def state(self, model: nn.Module, optimizer: TorchOptimizer) -> State:
        optimizer.settle()
        cut, ema = _cut(model), optimizer.ema()
        self.collective.broadcast_([*model.buffers(), *(x for name, x in ema.items() if name not in cut)])
        return State(
            weights=self._whole(cut, _held(model)),
            ema=self._whole(cut, ema),
            moments=self._whole(cut, optimizer.moments()),
            counters=optimizer.counters(),
        )

    def _whole(self, cut: Mapping[str, DTensor], parts: Mapping[str, Tensor]) -> dict[str, Array]:
        """Gather whole arrays from the parts of all ranks; every rank must call."""
        arrays = {}
        for key, part in parts.items():
            like = cut.get(_parameter(key, cut))
            arrays[key] = to_numpy(part) if like is None else self._gathered(part, like.shape)
        return arrays

    def _gathered(self, part: Tensor, shape: torch.Size) -> Array:
        padded = part.new_zeros((_rows(shape[0], self.collective.size), *shape[1:]))
        padded[: len(part)] = part.detach()
        return to_numpy(self.collective.all_gather_tensor(padded).flatten(0, 1)[: shape[0]])

    @override
    def restore(self, model: nn.Module, optimizer: TorchOptimizer, saved: State) -> None:
        optimizer.settle()
        saved = fitted(saved, model.state_dict())
        if saved.weights:
            # Each rank keeps only its part, so arrays that differ between ranks could not be noticed afterwards.
            ordered = {name: np.ascontiguousarray(saved.weights[name]) for name in sorted(saved.weights)}
            state_checks.check_equal_start(self.collective, state_checks.fingerprint(ordered))
            self._fill(model, _held(model), saved.weights, what="weights")
            optimizer.ranges_restored()
        if saved.ema and optimizer.ema():
            self._fill(model, optimizer.ema(), saved.ema, what="averaged weights")
        else:
            optimizer.restart_ema()
        if saved.moments:
            self._fill(model, optimizer.moments(), saved.moments, what="optimizer moments")
        if saved.counters:
            optimizer.set_counters(saved.counters)

    def _fill(self, model: nn.Module, targets: Mapping[str, Tensor], values: Mapping[str, Array], *, what: str) -> None:
        """Copy whole arrays ``values`` into ``targets``, taking this rank's part where a target is split."""
        cut, rank, size = _cut(model), self.collective.rank, self.collective.size
        shapes = {name: tuple(cut.get(_parameter(name, cut), x).shape) for name, x in targets.items()}
        state_checks.check_fit(shapes, values, what=what)
        fill(
            targets,
            {name: _part(values[name], rank, size) if _parameter(name, cut) else values[name] for name in targets},
            what=what,
        )

    @override
    def close(self) -> None:
        """Drop the process groups, that of the mesh included: a session may outlive the job."""
        super().close()
        self._mesh = None


class Parts:
    """The ``Exchange`` of FSDP, which averages gradients in the last backward pass and leaves each rank its part."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, FSDPModule)
        self._model = model
        tensors, cut = _held(model), _cut(model)
        self.held = {name: tensors[name].detach() for name in cut}
        """This rank's part of each parameter."""

    def during(self, *, last: bool) -> nullcontext[None]:
        """Suppress FSDP's exchange before the last micro batch."""
        self._model.set_requires_gradient_sync(last)
        return nullcontext()

    def finish(self) -> None:
        """Set the parts of averaged gradients as ``grad`` of the parts of weights."""
        for name, parameter in _cut(self._model).items():
            grad = parameter.grad
            self.held[name].grad = grad.to_local() if isinstance(grad, DTensor) else None
            parameter.grad = None


def _children(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the direct children that have parameters; a list is never called itself, so its members are yielded."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from _children(child)
        elif any(True for _ in child.parameters()):
            yield child


def _units(module: nn.Module, places: Counter[int]) -> Iterator[nn.Module]:
    """Yield the parts of ``module`` that FSDP gathers one by one: its children that have parameters.

    A weight can belong to one unit only. A child with a weight that other parts of the model use too is replaced by its
    own children; what none of them holds alone belongs to the unit of the whole model. ``places``: see ``_places``.
    """
    for child in _children(module):
        if all(count == places[weight] for weight, count in _places(child).items()):
            yield child
        else:
            yield from _units(child, places)


def _places(module: nn.Module) -> Counter[int]:
    """Return the number of places of each weight in ``module``, by the identity of the weight."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    return Counter(id(weight) for part in parts for weight in part.parameters(recurse=False))


def _cut(model: nn.Module) -> dict[str, DTensor]:
    """Return the split parameters by name; FSDP splits all of them along their first axis."""
    entries = model.named_parameters(remove_duplicate=False)  # tied weights have an entry of the state for each name
    return {name: x for name, x in entries if isinstance(x, DTensor)}


def _parameter(key: str, cut: Mapping[str, DTensor]) -> str:
    """Return the parameter's name of an entry ``name`` or ``<moment>/<name>``; empty if the entry is a buffer."""
    name = key.rpartition("/")[2]
    return name if name in cut else ""


@torch.no_grad()
def _held(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank holds: its parts of parameters, sharing memory with FSDP, and buffers."""
    state = model.state_dict(keep_vars=True)
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in state.items()}


def _rows(length: int, size: int) -> int:
    """Return the number of rows of each rank; the last ranks may have fewer or none."""
    return -(-length // size)


def _part(whole: Array, rank: int, size: int) -> Array:
    """Return the rows of an array that FSDP assigns to a rank."""
    rows = _rows(whole.shape[0], size)
    return whole[rank * rows : (rank + 1) * rows]
