"""Make layers of a model round their weight and input (``train.quantise``), in place."""

from collections.abc import Mapping
from typing import Any, cast

import paddle
from paddle import Tensor
from paddle.nn import Layer
from paddle.nn import functional as F

from mtrain.backends._paddle import state
from mtrain.backends._paddle.collective import PaddleCollective
from mtrain.backends._paddle.nn import Conv2d, Linear
from mtrain.core.interfaces import Array, Recipe
from mtrain.core.network.quantising import RANGE, Quantised, Ranges, choose_layers
from mtrain.core.overriding import override


class QuantisedConv2d(Quantised, Conv2d):
    """A Conv2d that rounds weight and input; ``attach`` makes it."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.round_both(x, self.weight)
        return F.conv2d(x, weight, self.bias, *self.geometry)


class QuantisedLinear(Quantised, Linear):
    """A Linear that rounds weight and input; ``attach`` makes it."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.product(*self.round_both(x, self.weight))


KINDS: Mapping[type[Layer], type[Layer]] = {Conv2d: QuantisedConv2d, Linear: QuantisedLinear}


def attach(model: Layer, recipe: Recipe) -> None:
    """Make the layers that ``recipe`` chooses round, and give each a buffer for its range.

    Raises:
        SpecError: See ``choose_layers``.
    """
    if recipe.quantise is None:
        return
    layers = {name: module for name, module in model.named_sublayers(include_self=True) if type(module) in KINDS}
    for name in choose_layers(layers, recipe):
        layer = layers[name]
        cast(Any, layer).__class__ = KINDS[type(layer)]
        layer.register_buffer(RANGE, paddle.zeros([2]))


def ranges(model: Layer, recipe: Recipe, collective: PaddleCollective) -> Ranges | None:
    """Return what moves the ranges of a model to which ``attach`` was applied; None: nothing is rounded."""
    if recipe.quantise is None:
        return None
    layers = {name: layer for name, layer in model.named_sublayers(include_self=True) if isinstance(layer, Quantised)}
    return Ranges(layers=layers, quantise=recipe.quantise, collective=collective, fill=_fill)


def _fill(targets: Mapping[str, Tensor], values: Mapping[str, Array]) -> None:
    state.fill(targets, values, what="ranges")
