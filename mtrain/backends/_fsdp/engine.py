"""mtrain's torch engine over FSDP2: it splits the model over ranks, trains the parts, and saves whole arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mtrain.backends._fsdp import internals
from mtrain.backends._fsdp.layout import MeshLayout, cut_axes
from mtrain.backends._fsdp.sharding import OwnParts, shard_unit, without_values
from mtrain.backends._fsdp.units import Unit, units
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.layout import use_channels_last
from mtrain.backends._torch.optimizer import TorchOptimizer
from mtrain.backends._torch.sharded import whole_states
from mtrain.backends._torch.sharded.engine import SplitEngine
from mtrain.backends._torch.sharded.methods import gather_in_methods
from mtrain.backends._torch.sharded.optimizer import ShardedOptimizer
from mtrain.backends._torch.sharded.shards import Boxes, Parts, refuse_scalars
from mtrain.backends._torch.sharded.spread import Spread
from mtrain.backends.base import Check
from mtrain.core.interfaces import Mesh, Recipe
from mtrain.core.interfaces.capabilities import Prepared
from mtrain.core.overriding import override
from mtrain.core.update.order import Exchange
from mtrain.errors import SpecError
from mtrain.spec import package_parts


class FsdpEngine(SplitEngine):
    """One rank of a job on FSDP2. ``prepare`` returns the model that was built, with FSDP's hooks on it."""

    def __init__(self, collective: TorchCollective, target: torch.device, *, unit: Unit, check: Check) -> None:
        super().__init__(collective, target, check=check)
        self.unit = unit
        self._channels_last = False
        self._layout: MeshLayout | None = None
        self._prepared: list[nn.Module] = []
        self._spread: Spread | None = None
        """Where the arrays of the model are that is being built."""

    @override
    def prepare(self, build: Callable[[], nn.Module], recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        # FSDP takes contiguous weights only, so each convolution converts its weight to channels last when it is
        # called.
        self._channels_last = recipe.channels_last
        mesh = recipe.mesh or Mesh(replicate=1, shard=self.collective.size, tensor=1)
        if self._layout is None or self._layout.mesh != mesh:
            self._layout = MeshLayout.of(mesh, self.target.type)
            internals.check_averages(self._layout.data)
        try:
            with self.returning_memory():
                return super().prepare(build, replace(recipe, channels_last=False))
        finally:
            self._spread = None

    @override
    def build_model(self, build: Callable[[], nn.Module], recipe: Recipe) -> nn.Module:
        """Build a model of which each rank keeps its part."""
        if self.collective.size == 1:
            return super().build_model(build, recipe)
        self._spread = Spread(self.collective, self.target)
        with self._spread:
            model = self._place(build(), recipe)
        self._spread.check_equal_start(model)
        self._spread.fill_rest(model.parameters())
        return model

    @override
    def with_own_optimizer(self, model: nn.Module, recipe: Recipe) -> Recipe:
        """Make a script's own optimizer, which may read weights, and may choose its groups by their shapes."""
        if self._spread is None or recipe.native_optimizer is None:
            return super().with_own_optimizer(model, recipe)
        with self._spread:
            recipe = super().with_own_optimizer(model, recipe)
        self._spread.fill_rest(model.parameters())  # such as a state that it has before the first step
        return recipe

    @override
    def move(self, model: nn.Module) -> nn.Module:
        """Leave a model on the host whose parts alone are to be on the device."""
        return super().move(model) if self._spread is None else model

    @override
    def wrap(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        return self._split_model(model, recipe)

    def _split_model(self, model: nn.Module, recipe: Recipe | None = None) -> tuple[nn.Module, "FsdpExchange"]:
        """Split ``model`` over ranks, in place.

        Raises:
            SpecError: FSDP cannot split it.
        """
        refuse_scalars(model, splits="FSDP")
        if isinstance(model, nn.ModuleList | nn.ModuleDict):
            raise SpecError(
                f"session.prepare: given a {type(model).__name__}, which has no forward method, in which FSDP gathers weights; prepare "
                "each of its modules under a name of its own, or train with ddp, horovod or deepspeed"
            )
        assert self._layout is not None, "prepare makes it"
        if self._channels_last:
            use_channels_last(model)
        if self._spread is None:
            self.shard(model, None)
            exchange = FsdpExchange(model, self._prepared)
        else:
            exchange = self._split_parts(model, self._layout, self._spread, recipe)
        whole_states.refuse(model, lambda weight, x: isinstance(weight, DTensor) and not isinstance(x, DTensor))
        self._prepared.append(model)
        gather_in_methods(model, partial(_gather_whole, model))
        return model, exchange

    def _split_parts(
        self, model: nn.Module, layout: MeshLayout, spread: Spread, recipe: Recipe | None
    ) -> "FsdpExchange":
        """Split a model whose weights are spread, in place: over tensor groups, stages and shards.

        Raises:
            SpecError: The layers cannot be shared, or the model cannot be divided into stages.
        """
        mesh = layout.mesh
        layers: Any = None
        if mesh.tensor > 1 or mesh.pipeline > 1:
            with spread:
                layers = package_parts.load("meshes", "layers", "parallel")(model, mesh)
            if layers.expected is not None:
                spread.fill_for_good(layers.expected)
        self._fill_buffers(model, spread)
        weights = without_values(model)
        if layers is not None:
            layers.share(layout)
        shapes = {name: x.shape for name, x in model.named_parameters(remove_duplicate=False)}
        boxes = layout.boxes(shapes, cut_axes(model), None if layers is None else layers.holders)
        own = OwnParts(layout, rank=self.collective.rank, target=self.target)
        own.take(model, weights, boxes, spread)
        if layers is None:
            self.shard(model, own)
            exchange = FsdpExchange(model, self._prepared)
        else:
            exchange = layers.exchange(self, layout, recipe, own, prepared=self._prepared)
        if mesh.shard != self.collective.size:
            exchange.boxes = boxes
        return exchange

    def _fill_buffers(self, model: nn.Module, spread: Spread) -> None:
        """Give every rank the buffers of a model, on its device; every rank must call."""
        for buffer in model.buffers():
            spread.fill(buffer)  # which may lie in the memory of a weight
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.target))

    def shard(self, model: nn.Module, own: OwnParts | None) -> None:
        """Let FSDP split a model in place, unit by unit; every rank must call."""
        assert self._layout is not None, "prepare makes it"
        for unit in [*units(model, self.unit).values(), model]:
            # Resharding after each use means that no whole copy survives: a change to the parts takes effect at the
            # next use.
            shard_unit(unit, self._layout, own)
        model.register_forward_hook(_watch_derivatives)

    @override
    def _wants_late(self) -> bool:
        # Losses are known on all ranks once the last micro batch was computed, and then on the host.
        in_stages = self._layout is not None and self._layout.mesh.pipeline > 1
        return not in_stages and super()._wants_late()

    @override
    def wrap_for_own_order(self, model: nn.Module) -> tuple[nn.Module, Exchange]:
        wrapped, exchange = self._split_model(model)
        exchange.own_order = True
        return wrapped, exchange

    splits_untrained = True

    @override
    def hold(self, model: nn.Module, recipe: Recipe) -> tuple[nn.Module, Exchange]:
        return self.wrap(model, recipe)

    @override
    def held_weights(self, prepared: Prepared, *, whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts: those of two models with the same shapes lie alike."""
        return ((name, _local(parameter).detach()) for name, parameter in prepared[0].named_parameters())

    @override
    def optimizer(self, model: nn.Module, recipe: Recipe, exchange: Exchange) -> TorchOptimizer:
        assert isinstance(exchange, FsdpExchange)
        recipe = replace(recipe, channels_last=self._channels_last)
        return ShardedOptimizer(
            model,
            recipe,
            parts=exchange.held,
            exchange=exchange,
            collective=self.collective,
            device=self.target,
        )

    @override
    def held_entries(self, model: nn.Module, parts: Parts) -> dict[str, Tensor]:
        return {
            name: parts[name].local.view((0, *x.shape[1:])) if x.is_meta else x
            for name, x in _held_parts(model).items()
        }

    @override
    def close(self) -> None:
        """Drop the process groups, that of the mesh included: a session may outlive the job."""
        super().close()
        self._layout = None
        self._prepared.clear()


class FsdpExchange:
    """The exchange of FSDP, which averages gradients in the last backward pass and leaves each rank its part."""

    def __init__(self, model: nn.Module, prepared: Sequence[nn.Module]) -> None:
        """Exchange the gradients of ``model``; ``prepared``: all models of the job, which may grow."""
        self._model = model
        self._prepared = prepared
        self.own_order = False
        """Whether a script orders backward passes, perhaps of several models."""
        # Not from the state, which may leave out what is not trained.
        self._parameters = _cut(model)
        self.held = {name: parameter.to_local().detach() for name, parameter in self._parameters.items()}
        """This rank's part of each parameter."""
        self.boxes: Mapping[str, Boxes] | None = None
        """Where all ranks' parts lie, on a mesh; None: one after the other."""
        self._kept: list[Any] = [[model, *(x for x in model.modules() if isinstance(x, FSDPModule))][-1], model]
        self._is_checked = False
        self._summed: Sequence[str] = ()
        self._tensor_group: dist.ProcessGroup | None = None

    def add_up(self, names: Sequence[str], group: dist.ProcessGroup) -> None:
        """Add up the gradients of the parameters ``names`` over a tensor group, each of whose ranks computes a part."""
        self._summed, self._tensor_group = names, group

    @contextmanager
    def during(self, *, last: bool) -> Iterator[None]:
        """Suppress FSDP's exchange before the last micro batch, unless a pass through another model may come between."""
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last or self.own_order)
        # The backward pass begins with the weights with which the forward pass ends. A script's own order may change
        # weights between the two.
        kept = [] if self.own_order else self._kept
        for unit in kept:
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit in kept:
                unit.set_reshard_after_forward(True, recurse=False)
                unit.reshard()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run the backward pass. Other models through which the loss goes get gradients from FSDP, which are dropped."""
        others = [x for model in self._prepared if model is not self._model for x in model.parameters()]
        former = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None
        try:
            loss.backward(retain_graph=retain_graph or None)
        finally:
            for parameter, gradient in zip(others, former, strict=True):
                parameter.grad = gradient

    def finish(self) -> None:
        """Set the parts of averaged gradients as ``grad`` of the parts of weights."""
        parameters = self._parameters
        if not self._is_checked:
            # A version of FSDP that moves its parts after they were handed out would train nothing.
            internals.check_same_memory({name: (self.held[name], x.to_local()) for name, x in parameters.items()})
            self._is_checked = True
        for name, parameter in parameters.items():
            grad = parameter.grad
            self.held[name].grad = grad.to_local() if isinstance(grad, DTensor) else None
            parameter.grad = None
        if self._summed:
            own = [grad for name in self._summed if (grad := self.held[name].grad) is not None]
            flat = torch.cat([grad.reshape(-1) for grad in own])
            dist.all_reduce(flat, group=self._tensor_group)
            for grad, whole in zip(own, flat.split([grad.numel() for grad in own]), strict=True):
                grad.copy_(whole.view(grad.shape))


@contextmanager
def _gather_whole(model: nn.Module) -> Iterator[None]:
    """Return a context in which all weights are whole at first; a layer that is called drops its own afterwards."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    yield
    if not torch.is_grad_enabled():  # else they are dropped by the backward pass that may follow
        for unit in units:
            unit.reshard()


def _watch_derivatives(model: nn.Module, inputs: object, outputs: object) -> None:
    """Refuse second derivatives through the outputs of a forward pass; a forward hook."""
    for tensor in internals.leaves(outputs):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(_refuse_second_derivatives)


def _refuse_second_derivatives(gradient: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward pass: create_graph=True was given
        raise SpecError(
            "a gradient of a gradient (create_graph=True) is wanted of a model on backend fsdp, which drops whole weights after the first "
            "backward pass; use ddp, horovod, solo or deepspeed with stage 0, 1 or 2"
        )


def _cut(model: nn.Module) -> dict[str, DTensor]:
    """Return the split parameters by name; FSDP splits all of them along their first axis."""
    entries = model.named_parameters(remove_duplicate=False)  # tied weights have an entry of the state for each name
    return {name: x for name, x in entries if isinstance(x, DTensor)}


@torch.no_grad()
def _held_parts(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank holds: its parts of parameters, sharing memory with FSDP, and buffers."""
    state = model.state_dict(keep_vars=True)
    # What another stage of a pipeline holds is an array without values here, which the caller replaces.
    return {name: _local(x) for name, x in state.items()}


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
