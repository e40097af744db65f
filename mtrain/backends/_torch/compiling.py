"""Compile a model by torch's compiler (``train.compile``), in place: whole, or block by block."""

from torch import nn

from mtrain.core.interfaces import Recipe
from mtrain.core.network.recomputing import outermost


def attach(model: nn.Module, recipe: Recipe) -> None:
    """Let the model, or each of the blocks that ``recipe`` names, be compiled when it is first called.

    Blocks of one class and of one shape share what is compiled for the first, so a deep model starts as soon as a flat one.

    Raises:
        SpecError: A pattern of blocks is found in no name.
    """
    if not recipe.compile:
        return
    modules = dict(model.named_modules())
    blocks = outermost(modules, recipe.compile_blocks, key="train.compile") if recipe.compile_blocks else [""]
    for name in blocks:
        modules[name].compile()
