"""Make layers of a model round their weight and input (``train.quantise``), in place."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.backends._torch import internals, state
from mtrain.backends._torch.collective import TorchCollective
from mtrain.core.interfaces import Array, Recipe
from mtrain.core.network.quantising import RANGE, Quantised, Ranges, choose_layers
from mtrain.core.overriding import override

Arrangement: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class QuantisedConv2d(Quantised, nn.Conv2d):
    """A Conv2d that rounds weight and input; ``attach`` makes it."""

    arrange: Arrangement | None = None
    """Gives rounded input and weight their memory layout; ``layout.use`` sets it."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        x, weight = self.round_both(input, self.weight)
        return internals.convolve(self, *(self.arrange(x, weight) if self.arrange else (x, weight)))


class QuantisedLinear(Quantised, nn.Linear):
    """A Linear that rounds weight and input; ``attach`` makes it."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(*self.round_both(input, self.weight), self.bias)


KINDS: Mapping[type[nn.Module], type[nn.Module]] = {nn.Conv2d: QuantisedConv2d, nn.Linear: QuantisedLinear}


def attach(model: nn.Module, recipe: Recipe) -> None:
    """Make the layers that ``recipe`` chooses round, and give each a buffer for its range.

    Raises:
        SpecError: See ``choose_layers``.
    """
    if recipe.quantise is None:
        return
    layers = {name: module for name, module in model.named_modules() if type(module) in KINDS}
    for name in choose_layers(layers, recipe):
        layer = layers[name]
        cast(Any, layer).__class__ = KINDS[type(layer)]
        layer.register_buffer(RANGE, torch.zeros(2))


def ranges(model: nn.Module, recipe: Recipe, collective: TorchCollective) -> Ranges | None:
    """Return what moves the ranges of a model to which ``attach`` was applied; None: nothing is rounded."""
    if recipe.quantise is None:
        return None
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Quantised)}
    return Ranges(layers=layers, quantise=recipe.quantise, collective=collective, fill=_fill)


def _fill(targets: Mapping[str, Tensor], values: Mapping[str, Array]) -> None:
    state.fill(targets, values, what="ranges")
