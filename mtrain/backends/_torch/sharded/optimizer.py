"""The torch engine's optimizer for jobs whose ranks each hold a part of every array."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from mtrain.backends._torch.average import Average, nothing
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.native import Made
from mtrain.backends._torch.optimizer import Gradients, TorchOptimizer
from mtrain.backends._torch.scripts.native_parts import rule_for_parts
from mtrain.backends._torch.sharded.rules import ShardRule
from mtrain.backends._torch.sharded.shards import Boxes, Part, Parts, find_ties, spans_of
from mtrain.core.interfaces import Recipe
from mtrain.core.overriding import override
from mtrain.core.update.order import Exchange, UpdateOrder
from mtrain.core.update.recipe import check_parts, ema_shares
from mtrain.errors import SpecError

BUCKET = 4 * 1024 * 1024
"""Number of gradient elements that are gathered at a time to compute the norms of whole arrays."""


class PartsOptimizer(TorchOptimizer):
    """A TorchOptimizer that clips by the norm of whole arrays even where a rank holds only parts of them."""

    parts: Parts

    def _use_parts(self, cut: Mapping[str, Part], publish: Callable[[], None] = nothing) -> None:
        """Put rules and average on parts; ``parts`` must be set before; ``publish``: see ``PartsAverage``."""
        recipe, rank = self._recipe, self._collective.rank
        if recipe.native_optimizer is not None:
            (names,), (held,) = self.groups, self._parameters
            self._rules = [rule_for_parts(cast(Made, recipe.native_optimizer), names, cut, held, rank=rank)]
        else:
            self._rules = [
                ShardRule(
                    recipe.rule,
                    [cut[name] for name in names],
                    rank,
                    options,
                    shapes=[parameter.shape for parameter in parameters],
                    channels_last=recipe.channels_last,
                )
                for names, parameters, (_, options) in zip(self.groups, self._parameters, recipe.groups, strict=True)
            ]
        if isinstance(self._average, Average):
            live, self._average = self._live, None  # dropped before another one takes as much memory
            self._average = PartsAverage(list(live), list(live.values()), partial(ema_shares, recipe), publish)
        self._take_modes(publish)

    @override
    def _by_name(self, gradients: Gradients) -> Mapping[str, Tensor]:
        return super()._by_name(gradients) if len(self.parts) == 0 else UpdateOrder._by_name(self, gradients)

    @override
    def _norm(self, gradients: Gradients) -> Tensor:
        if len(self.parts) == 0:
            return super()._norm(gradients)
        names = [
            name
            for group, parameters in zip(self.groups, self._parameters, strict=True)
            for name, parameter in zip(group, parameters, strict=True)
            if parameter.grad is not None
        ]
        grads_by_name = dict(zip(names, gradients.all, strict=True))
        return self.parts.norm(grads_by_name, self._device, channels_last=self._recipe.channels_last).double()


class ShardedOptimizer(PartsOptimizer):
    """``core.interfaces.Optimizer`` on the parts of arrays that a rank holds.

    Rule, clipping and average change the parts in place, with the rounding that whole arrays would get.
    ``Exchange.finish`` must store this rank's part of each averaged gradient as the ``grad`` of the part. A gradient
    must be None on all ranks or on none. Moments and averages (``moments()``, ``ema()``) are parts too, in the shapes
    of parts.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        parts: Mapping[str, Tensor],
        exchange: Exchange,
        collective: TorchCollective,
        device: torch.device,
    ) -> None:
        """Make the optimizer; every rank must call.

        Args:
            model: Its parameters have the shapes of whole arrays.
            recipe: As for ``TorchOptimizer``.
            parts: This rank's part of every parameter by name, contiguous, sharing memory with the library's own copy.
                The parts of rank 0, 1, ... concatenated are the whole array, flattened, unless the exchange has ``boxes``.
            exchange: As for ``TorchOptimizer``, but it leaves gradients on the parts.
            collective: As for ``TorchOptimizer``.
            device: As for ``TorchOptimizer``.
        """
        check_parts(recipe, splits="this backend")
        # On a mesh an exchange says where all ranks' parts lie, else they are concatenated.
        boxes: Mapping[str, Boxes] | None = getattr(exchange, "boxes", None)
        # An exchange for several models runs the backward pass itself, so that each gets its own gradients alone.
        self._backward: Callable[..., None] | None = getattr(exchange, "backward", None)
        if recipe.prune is not None:
            raise SpecError("train.prune: this backend splits weights over the ranks, but masks need whole ones")
        held_model = cast(nn.Module, Held(model, parts))
        super().__init__(held_model, recipe, exchange=exchange, collective=collective, device=device)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        cut = _cut(parts, shapes, collective) if boxes is None else _box(parts, shapes, boxes, rank=collective.rank)
        self.parts = Parts(
            {**cut, **{alias: cut[name] for alias, name in find_ties(model).items() if name in cut}},
            collective,
            bucket=BUCKET,
        )
        self._use_parts(cut)

    @override
    def _differentiate(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        differentiate = self._backward or super()._differentiate
        differentiate(loss, retain_graph=retain_graph)


def _cut(
    parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], collective: TorchCollective
) -> dict[str, Part]:
    """Find where every rank's part lies in each array of ``shapes``; every rank must call."""
    lengths = collective.all_gather([parts[name].numel() for name in shapes])
    parts_by_name = {}
    for (name, shape), rank_lengths in zip(shapes.items(), zip(*lengths, strict=True), strict=True):
        bounds = [sum(rank_lengths[:rank]) for rank in range(len(rank_lengths) + 1)]
        whole_length = torch.Size(shape).numel()
        assert bounds[-1] == whole_length, f"{name}: parts of {rank_lengths} elements, the array has {whole_length}"
        parts_by_name[name] = Part(shape, spans_of(whole_length, bounds), parts[name].detach().view(-1))
    return parts_by_name


def _box(
    parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, Boxes], *, rank: int
) -> dict[str, Part]:
    """Describe parts that a mesh has cut."""
    for name in shapes:
        expected = tuple(end - first for first, end in boxes[name].held[rank])
        assert tuple(parts[name].shape) == expected, (
            f"{name}: a part of {tuple(parts[name].shape)}, expected {expected}"
        )
    return {name: Part(shape, boxes[name], parts[name].detach().view(-1)) for name, shape in shapes.items()}


class Held:
    """The tensors that a rank holds of a model, with the methods of ``nn.Module`` that an optimizer calls."""

    def __init__(self, model: nn.Module, parts: Mapping[str, Tensor]) -> None:
        """Present ``model`` with its split parameters replaced by this rank's ``parts``, by name."""
        self._model = model
        self._parts = parts
        for name, parameter in model.named_parameters():
            if name in parts:
                parts[name].requires_grad_(parameter.requires_grad)
        self._first_names = find_ties(model)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters in model order: this rank's part where one is split, else the whole parameter."""
        return ((name, self._parts.get(name, parameter)) for name, parameter in self._model.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers, which every rank holds whole."""
        return self._model.buffers()

    def state_dict(self, *, keep_vars: bool) -> dict[str, Tensor]:
        """Return the live persistent tensors in model order, with parts in place of split parameters."""
        entries = self._model.state_dict(keep_vars=keep_vars)
        names = self._first_names
        return {name: self._parts.get(names.get(name, name), tensor) for name, tensor in entries.items()}


class PartsAverage(Average):
    """An average over parts of arrays that swaps by copying, because the library keeps pointers to its parts.

    After each swap it calls ``publish``, which lets the library distribute the new values where it must.
    """

    def __init__(
        self,
        names: Sequence[str],
        live: Sequence[Tensor],
        shares: Callable[[int], tuple[float, float]],
        publish: Callable[[], None] = nothing,
    ) -> None:
        super().__init__(names, live, shares)
        self._publish = publish

    @override
    @torch.no_grad()
    def swap(self) -> None:
        for live, shadow in zip(self.live, self.shadow, strict=True):
            live_values = live.detach().clone()
            live.copy_(shadow)
            shadow.copy_(live_values)
        self._publish()
