"""Make blocks of a model compute their inner results again in the backward pass (``train.recompute``), in place."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import paddle
from paddle.distributed.fleet.utils import recompute
from paddle.nn import Layer

from mtrain.backends._paddle import paddle2_compatibility
from mtrain.core.interfaces import Recipe
from mtrain.core.network.recomputing import Block, Pass, choose_blocks


def attach(model: Layer, recipe: Recipe) -> None:
    """Make the blocks that ``recipe`` chooses recompute.

    Raises:
        SpecError: See ``choose_blocks``.
    """
    layers = dict(model.named_sublayers(include_self=True))
    for name in choose_blocks(layers, recipe) if recipe.recompute else ():
        cast(Any, layers[name]).forward = _Forward(layers[name])


class SameRandomNumbers:
    """A function whose second call draws the random numbers of the first; Paddle 2.6 does so on devices only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._states: list[Any] | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the function."""
        if self._states is None:
            self._states = paddle.get_rng_state()
            return self._function(*inputs, **named)
        current = paddle.get_rng_state()
        paddle.set_rng_state(self._states)
        try:
            return self._function(*inputs, **named)
        finally:
            paddle.set_rng_state(current)


class _Forward:
    """The forward pass of a block, as an attribute of the block in the place of its class's method."""

    def __init__(self, block: Layer) -> None:
        self._layer = block

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        forward = partial(type(self._layer).forward, self._layer)
        if not (self._layer.training and paddle.is_grad_enabled()):
            return forward(*inputs, **named)
        layers = self._layer.sublayers(include_self=True)
        buffers = [(layer, name) for layer in layers for name, _ in layer.named_buffers(include_sublayers=False)]
        repeatable = Pass(block=Block(forward=forward, modules=layers, buffers=buffers))
        # Paddle logs a warning in each pass of a block none of whose inputs takes a gradient, as the first one's images.
        variable = paddle.zeros([1])
        variable.stop_gradient = False
        run = SameRandomNumbers(repeatable) if paddle2_compatibility.NEEDED else repeatable
        return recompute(
            lambda _, *given: run(*given, **named),
            variable,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=not paddle2_compatibility.NEEDED,
        )
