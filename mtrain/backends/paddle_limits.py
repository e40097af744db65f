"""Refuse recipes that no backend on Paddle can follow. Importing this module does not import Paddle."""

from mtrain.core.interfaces import Recipe
from mtrain.errors import SpecError


def check(recipe: Recipe, *, on_cpu: bool) -> None:
    """Refuse a recipe that Paddle would ignore with a warning, or cannot follow.

    Raises:
        SpecError: The recipe asks for half precision on the CPU, for which Paddle has no kernels, or a compiled model.
    """
    if recipe.precision in ("bf16", "fp16") and on_cpu:
        raise SpecError(
            f"train.precision: {recipe.precision} was given, but Paddle has no mixed precision on the CPU; use fp32 there"
        )
    if recipe.compile:
        raise SpecError(
            "train.compile: given, but Paddle's compiler does not take models that are written for every "
            "framework, or makes them slower; set train.compile: false"
        )
