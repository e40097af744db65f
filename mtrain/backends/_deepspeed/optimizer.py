"""The torch engine's optimizer on the parts of weights that a rank holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from mtrain.backends._deepspeed.zero import Zero, ZeroExchange
from mtrain.backends._torch import precision
from mtrain.backends._torch.average import Average
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.optimizer import TorchOptimizer
from mtrain.backends._torch.parts import Part, Parts
from mtrain.backends._torch.shard_rules import ShardRule
from mtrain.core.interfaces import Rates, Recipe
from mtrain.core.optimizer import ema_shares


class Held:
    """What a rank holds of a model, with the methods of a model that an optimizer asks for."""

    def __init__(self, model: nn.Module, parts: Mapping[str, Part]) -> None:
        self._model = model
        self._parts = parts
        for name, parameter in model.named_parameters():
            if name in parts:
                parts[name].held.requires_grad_(parameter.requires_grad)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parts where there are any, else whole parameters."""
        for name, parameter in self._model.named_parameters():
            yield name, self._parts[name].held if name in self._parts else parameter

    def buffers(self) -> Iterator[Tensor]:
        """Whole, as each rank has them."""
        return self._model.buffers()

    def state_dict(self, *, keep_vars: bool) -> dict[str, Tensor]:
        """Live persistent tensors in model order; parts where there are any."""
        entries = self._model.state_dict(keep_vars=keep_vars)
        return {name: self._parts[name].held if name in self._parts else x for name, x in entries.items()}


class PartsAverage(Average):
    """An average of parts: they stay where DeepSpeed looks for them, so contents are traded, and then published."""

    def __init__(
        self,
        names: Sequence[str],
        live: Sequence[Tensor],
        shares: Callable[[int], tuple[float, float]],
        publish: Callable[[], None],
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


class ZeroOptimizer(TorchOptimizer):
    """``core.interfaces.Optimizer`` over DeepSpeed. Rules, clipping and average are those of every backend on torch."""

    def __init__(  # noqa: PLR0913 - what TorchOptimizer takes, and the stage
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        exchange: ZeroExchange,
        zero: Zero,
        parts: Parts,
        collective: TorchCollective,
        device: torch.device,
    ) -> None:
        held = Held(model, zero.parts)
        super().__init__(cast(nn.Module, held), recipe, exchange=exchange, collective=collective, device=device)
        self.parts = parts
        self.zero = zero
        self._zero_exchange = exchange
        if not zero.parts:
            return
        self._rules = [
            ShardRule(
                recipe.rule,
                [zero.parts[name] for name in names],
                collective.rank,
                options,
                channels_last=recipe.channels_last,
            )
            for names, (_, options) in zip(self.groups, recipe.groups, strict=True)
        ]
        if self._average is not None:
            names, live = self._average.names, self._average.live
            self._average = PartsAverage(names, live, partial(ema_shares, recipe), zero.publish)

    @override
    def backward(self, loss: Tensor) -> None:
        with precision.backward_context(self._recipe.precision, self._device):
            factor = self._scaler.scale / self._recipe.accumulate
            self._zero_exchange.backward(loss if factor == 1 else loss * factor)

    @override
    def step(self, rates: Rates) -> float:
        norm = super().step(rates)
        self._zero_exchange.publish()
        return norm

    @override
    def _norm(self, grads: list[Tensor]) -> float:
        if not self.zero.parts:
            return super()._norm(grads)
        names = [
            name
            for group, parameters in zip(self.groups, self._parameters, strict=True)
            for name, parameter in zip(group, parameters, strict=True)
            if parameter.grad is not None
        ]
        held = dict(zip(names, grads, strict=True))
        return self.parts.norm(held, self._device, channels_last=self._recipe.channels_last)
