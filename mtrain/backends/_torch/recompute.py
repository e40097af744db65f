"""Make blocks of a model compute their inner results again in the backward pass (``train.recompute``), in place."""

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mtrain.core.interfaces import Recipe
from mtrain.core.network.recomputing import Block, Pass, choose_blocks


def attach(model: nn.Module, recipe: Recipe) -> None:
    """Make the blocks that ``recipe`` chooses recompute.

    Raises:
        SpecError: See ``choose_blocks``.
    """
    modules = dict(model.named_modules())
    for name in choose_blocks(modules, recipe) if recipe.recompute else ():
        cast(Any, modules[name]).forward = _Forward(modules[name])


class _Forward:
    """The forward pass of a block, as an attribute of the block in the place of its class's method.

    Hooks of a library on the block surround it, so they run once; those on modules below it run in both passes.
    """

    def __init__(self, block: nn.Module) -> None:
        self._module = block

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        # The class may change after ``attach``, as that of convolutions does for another memory layout.
        forward = partial(type(self._module).forward, self._module)
        if not (self._module.training and torch.is_grad_enabled()):
            return forward(*inputs, **named)
        modules = list(self._module.modules())
        buffers = [(module, name) for module in modules for name, _ in module.named_buffers(recurse=False)]
        block = Block(forward=forward, modules=modules, buffers=buffers)
        # A second pass that stopped early would leave out hooks behind modules, in which a library drops whole weights.
        return checkpoint(Pass(block=block), *inputs, use_reentrant=False, early_stop=False, **named)
