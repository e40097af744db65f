"""Reckon what a rank sends in an update with DeepSpeed ZeRO, for the plan. Importing this module imports no framework."""

from collections.abc import Sequence

from mtrain.backends._deepspeed.settings import Sharding, settings
from mtrain.core import rings
from mtrain.core.interfaces import PlannedArray, Recipe


def sent_per_update(
    arrays: Sequence[PlannedArray], recipe: Recipe, sharding: Sharding, *, size: int, on_cpu: bool
) -> float | None:
    """Return the bytes that each of ``size`` ranks sends; None: not known. See ``Backend.sent_per_update``."""
    if sharding.stage == 0:
        return rings.of_gradients(arrays, recipe, size=size)
    zero = settings(recipe, sharding, size=size, pin_memory=False)["zero_optimization"]
    exchanges = recipe.accumulate if sharding.reduction == "micro_batch" else 1
    if sharding.stage == 3:
        return _of_split_weights(arrays, recipe, zero, exchanges=exchanges, size=size, on_cpu=on_cpu)
    trained = [array.length for array in arrays if array.trained]
    each = rings.element_bytes(recipe)
    share = _pad(sum(trained), size)
    # Gradients are added up on all ranks, and weights gathered after the update.
    own = exchanges * rings.of_gradients(arrays, recipe, size=size) + rings.all_gather(share * each, size=size)
    longest = _longest_of_split(trained, share=share, size=size, bucket=zero["reduce_bucket_size"])
    return own + rings.all_gather(longest * each, size=size)


def _pad(length: int, size: int) -> int:
    """Return the length of the equal shares of a vector of ``length`` elements."""
    return 2 * -(-length // (2 * size))  # DeepSpeed pads the vector to a multiple of twice the number of ranks


def _longest_of_split(lengths: Sequence[int], *, share: int, size: int, bucket: int) -> int:
    """Return how many elements are gathered from each rank to take the norms of arrays that lie on several.

    A gather takes about ``bucket`` elements, and as many from each rank as from that with most of them.
    """
    total, gathered, start = 0, 0, 0
    parts = [0] * size
    for length in lengths:
        first, end = start, start + length
        start = end
        if first // share == (end - 1) // share:
            continue
        if gathered and gathered + length > bucket:
            total, gathered, parts = total + max(parts), 0, [0] * size
        gathered += length
        for rank in range(first // share, (end - 1) // share + 1):
            parts[rank] += min(end, (rank + 1) * share) - max(first, rank * share)
    return total + max(parts)


def _of_split_weights(
    arrays: Sequence[PlannedArray], recipe: Recipe, zero: dict[str, int], *, exchanges: int, size: int, on_cpu: bool
) -> float | None:
    """Return what a rank sends in stage 3, in which each rank has an equal part of every weight."""
    if sum(x.length for x in arrays) > min(zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]):
        return None  # weights are dropped within a pass and gathered again, nobody knows how often
    each = rings.element_bytes(recipe)
    gathered = exchanged = 0.0
    for x in arrays:
        part = -(-x.length // size)
        # A small weight stays whole on every rank, and is gathered after each update; a large one in each forward pass,
        # to be kept until the backward pass.
        is_small = x.length <= zero["stage3_param_persistence_threshold"]
        gathered += part * each * (1 if is_small else recipe.accumulate)
        if x.trained:
            gathered += part * each  # for norms with the bits of whole gradients
            exchanged += part * size * each
    return rings.all_gather(gathered, size=size) + exchanges * rings.reduce_scatter(exchanged, size=size, on_cpu=on_cpu)
