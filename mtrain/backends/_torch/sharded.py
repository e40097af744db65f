"""The torch engine's optimizer where every rank holds a part of each array, and the parts of all ranks are the whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from mtrain.backends._torch.average import Average
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.optimizer import Exchange, TorchOptimizer
from mtrain.backends._torch.shard_rules import ShardRule
from mtrain.backends._torch.shards import Part, Parts, spans_of
from mtrain.core.interfaces import Recipe
from mtrain.core.recipe import ema_shares

BUCKET = 4 * 1024 * 1024
"""Elements of gradients that are whole at a time, to take their norm."""


class PartsOptimizer(TorchOptimizer):
    """On what a rank holds; where arrays are split, it clips by the norm of whole ones."""

    parts: Parts

    @override
    def _norm(self, grads: list[Tensor]) -> float:
        if len(self.parts) == 0:
            return super()._norm(grads)
        names = [
            name
            for group, parameters in zip(self.groups, self._parameters, strict=True)
            for name, parameter in zip(group, parameters, strict=True)
            if parameter.grad is not None
        ]
        held = dict(zip(names, grads, strict=True))
        return self.parts.norm(held, self._device, channels_last=self._recipe.channels_last)


class ShardedOptimizer(PartsOptimizer):
    """``core.interfaces.Optimizer`` on the parts that a rank holds.

    Rule, clipping and average change the parts in place, with the rounding that whole arrays would get. ``Exchange.finish``
    must leave this rank's part of each averaged gradient as the ``grad`` of the part, None on all ranks or on none; moments
    and averages (``moments()``, ``ema()``) are parts too, in the shapes of parts.
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
        """Every rank calls.

        ``parts``: of every parameter by name, contiguous, sharing memory with what the library keeps. The elements of all
        ranks' parts, one rank behind the other, are those of the whole array, whose shape is that of the model's parameter.
        """
        held = cast(nn.Module, Held(model, parts))
        super().__init__(held, recipe, exchange=exchange, collective=collective, device=device)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        cut = _cut(parts, shapes, collective)
        self.parts = Parts(cut, collective, bucket=BUCKET)
        self._rules = [
            _Shaped(recipe, [cut[name] for name in names], parameters, collective.rank, options)
            for names, parameters, (_, options) in zip(self.groups, self._parameters, recipe.groups, strict=True)
        ]
        if self._average is not None:
            self._average = PartsAverage(self._average.names, self._average.live, partial(ema_shares, recipe))


def _cut(
    parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], collective: TorchCollective
) -> dict[str, Part]:
    """Where every rank's part lies in each array of ``shapes``."""
    lengths = collective.all_gather([parts[name].numel() for name in shapes])
    found = {}
    for (name, shape), of_ranks in zip(shapes.items(), zip(*lengths, strict=True), strict=True):
        bounds = [sum(of_ranks[:rank]) for rank in range(len(of_ranks) + 1)]
        whole = torch.Size(shape).numel()
        assert bounds[-1] == whole, f"{name}: parts of {of_ranks} elements, the array has {whole}"
        found[name] = Part(shape, spans_of(whole, bounds), parts[name].detach().view(-1))
    return found


class _Shaped:
    """``rules.Rule`` over a ``ShardRule``, which knows no shapes."""

    def __init__(
        self, recipe: Recipe, parts: Sequence[Part], held: Sequence[Tensor], rank: int, options: Mapping[str, float]
    ) -> None:
        self._rule = ShardRule(recipe.rule, parts, rank, options, channels_last=recipe.channels_last)
        self.moments = {
            name: [moment.view(part.shape) for moment, part in zip(moments, held, strict=True)]
            for name, moments in self._rule.moments.items()
        }

    def apply(self, taken: Sequence[int], grads: Sequence[Tensor], *, rate: float, momentum: float | None) -> None:
        """See ``Rule.apply``."""
        self._rule.apply(taken, [grad.reshape(-1) for grad in grads], rate=rate, momentum=momentum)

    def set_updates(self, updates: int) -> None:
        """See ``Rule.set_updates``."""
        self._rule.set_updates(updates)


class Held:
    """What a rank holds of a model, with the methods of a model that an optimizer asks for."""

    def __init__(self, model: nn.Module, parts: Mapping[str, Tensor]) -> None:
        """``parts``: of the parameters that are split."""
        self._model = model
        self._parts = parts
        for name, parameter in model.named_parameters():
            if name in parts:
                parts[name].requires_grad_(parameter.requires_grad)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parts where there are any, else whole parameters; in model order."""
        return ((name, self._parts.get(name, parameter)) for name, parameter in self._model.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Whole, as each rank has them."""
        return self._model.buffers()

    def state_dict(self, *, keep_vars: bool) -> dict[str, Tensor]:
        """Live persistent tensors in model order; parts where there are any."""
        entries = self._model.state_dict(keep_vars=keep_vars)
        return {name: self._parts.get(name, tensor) for name, tensor in entries.items()}


def _nothing() -> None:
    """Nothing."""


class PartsAverage(Average):
    """Contents are traded, not pointers: the library looks for parts where they always were. Then they are published."""

    def __init__(
        self,
        names: Sequence[str],
        live: Sequence[Tensor],
        shares: Callable[[int], tuple[float, float]],
        publish: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__(names, live, shares)
        self._publish = publish

    @override
    @torch.no_grad()
    def swap(self) -> None:
        for live, shadow in zip(self.live, self.shadow, strict=True):
            kept = live.detach().clone()
            live.copy_(shadow)
            shadow.copy_(kept)
        self._publish()
