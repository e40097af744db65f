"""Reckon how many bytes a rank sends in collectives that are carried by rings, as those of gloo, NCCL and Horovod are."""

from collections.abc import Sequence

from mtrain.core.interfaces.backend import PlannedArray
from mtrain.core.interfaces.recipe import Recipe


def all_reduce(whole_bytes: float, *, size: int) -> float:
    """Return what each of ``size`` ranks sends to add up arrays of ``whole_bytes``."""
    return 2 * (size - 1) / size * whole_bytes


def all_gather(part_bytes: float, *, size: int) -> float:
    """Return what each of ``size`` ranks sends to receive the part of every other one; ``part_bytes``: the longest part."""
    return (size - 1) * part_bytes


def reduce_scatter(whole_bytes: float, *, size: int, on_cpu: bool) -> float:
    """Return what each of ``size`` ranks sends to get its part of the sum of arrays of ``whole_bytes``."""
    # gloo, which connects ranks on CPUs, adds everything up on every rank, and drops what belongs to others.
    whole = all_reduce(whole_bytes, size=size)
    return whole if on_cpu else whole / 2


def element_bytes(recipe: Recipe) -> int:
    """Return the size of an element of weights and gradients: both stay in float32 under mixed precision."""
    return 8 if recipe.precision == "fp64" else 4


def of_gradients(arrays: Sequence[PlannedArray], recipe: Recipe, *, size: int) -> float:
    """Return what a rank sends in an update where whole gradients are added up once, and nothing else is exchanged."""
    trained = sum(array.length for array in arrays if array.trained)
    return all_reduce(trained * element_bytes(recipe), size=size)
