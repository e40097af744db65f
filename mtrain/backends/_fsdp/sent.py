"""Reckon what a rank sends in an update with FSDP2, for the plan. Importing this module imports no framework."""

from collections.abc import Sequence
from math import prod

from mtrain.core import rings
from mtrain.core.interfaces import PlannedArray, Recipe


def sent_per_update(arrays: Sequence[PlannedArray], recipe: Recipe, *, size: int, on_cpu: bool) -> float:
    """Return the bytes that each of ``size`` ranks sends. See ``Backend.sent_per_update``."""
    each = rings.element_bytes(recipe)
    gathered = exchanged = 0.0
    for array in arrays:
        rows, *others = array.shape
        part = -(-rows // size) * prod(others) * each  # FSDP divides the first axis, and pads it
        gathered += 2 * recipe.accumulate * part  # for the forward and for the backward pass
        if array.trained:
            # For norms with the bits of whole gradients; a single row lies on one rank, which takes its norm.
            gathered += part if rows > 1 else 0
            exchanged += part * size
    return rings.all_gather(gathered, size=size) + rings.reduce_scatter(exchanged, size=size, on_cpu=on_cpu)
