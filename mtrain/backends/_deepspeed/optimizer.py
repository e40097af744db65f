"""The torch engine's optimizer for DeepSpeed, on the parts of weights that a rank holds."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtrain.backends._deepspeed.zero import Zero, ZeroExchange
from mtrain.backends._torch.average import Average
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.native import Made
from mtrain.backends._torch.native_parts import rule_for_parts
from mtrain.backends._torch.shard_rules import ShardRule
from mtrain.backends._torch.sharded import Held, PartsAverage, PartsOptimizer
from mtrain.backends._torch.shards import Parts
from mtrain.core.interfaces import Array, Rates, Recipe
from mtrain.core.overriding import override
from mtrain.core.recipe import ema_shares


class ZeroOptimizer(PartsOptimizer):
    """``core.interfaces.Optimizer`` over DeepSpeed, with the rules, clipping and average of every backend on torch."""

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
        # In stage 0 nothing is split, and a user's own optimizer gets the module itself.
        held_model = Held(model, {name: part.local for name, part in zero.parts.items()}) if zero.parts else model
        super().__init__(cast(nn.Module, held_model), recipe, exchange=exchange, collective=collective, device=device)
        self.parts = parts
        self.zero = zero
        self._zero_exchange = exchange
        if not zero.parts:
            return
        self._rules = self._rules_for_parts(recipe, zero, collective.rank)
        if isinstance(self._average, Average):
            names, live = self._average.names, self._average.live
            self._average = None  # dropped before another one takes as much memory
            self._average = PartsAverage(names, live, partial(ema_shares, recipe), zero.publish)
        self._take_modes(zero.publish)

    def _rules_for_parts(self, recipe: Recipe, zero: Zero, rank: int) -> list[Any]:
        if recipe.native_optimizer is not None:
            made, (names,), (held,) = cast(Made, recipe.native_optimizer), self.groups, self._parameters
            return [rule_for_parts(made, names, zero.parts, held, rank=rank)]
        return [
            ShardRule(
                recipe.rule,
                [zero.parts[name] for name in names],
                rank,
                options,
                channels_last=recipe.channels_last,
            )
            for names, (_, options) in zip(self.groups, recipe.groups, strict=True)
        ]

    @override
    def _differentiate(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        differentiate = self._zero_exchange.backward_alone if self._recipe.own_order else self._zero_exchange.backward
        differentiate(loss, retain_graph=retain_graph)

    @override
    def step(self, rates: Rates) -> float:
        norm = super().step(rates)
        self._zero_exchange.publish()
        return norm

    @override
    def step_later(
        self, rates: Rates, numbers: Sequence[float], tensors: Sequence[Tensor]
    ) -> Callable[[], tuple[float, Array]]:
        read = super().step_later(rates, numbers, tensors)
        self._zero_exchange.publish()
        return read
