"""Find the factor between two losses or gradients, and say where it may come from.

Sketches are linear: a gradient that is twice as large leaves no remainder when the other one is doubled, and this is how a
wrong factor is told from a wrong gradient.
"""

from __future__ import annotations

import math

import numpy as np

from mtrain_trace import steps
from mtrain_trace.comparing import Comparison
from mtrain_trace.reading import Update

EXPLAINED = 0.02
"""Largest remainder that a factor may leave, relative to the length of what it explains."""


def factor_words(
    factor: float, comparison: Comparison, theirs: Update, ours: Update, *, what: str, name: str = ""
) -> str:
    """Say what a whole factor between two losses or gradients may come from; ``name``: of one of several losses."""
    front = f"the {name or what} of B is {_shown_factor(factor)} that of A"
    if rest := _short_window(factor, comparison, ours, theirs):
        return f"{front}: {rest}"
    total = _sum_words(factor, comparison, ours, theirs) if what == "loss" else ""
    if total and (ours.summed or theirs.summed):
        return f"{front}: {total}"
    origin = _origin_words(front, factor, comparison, theirs, ours, what)
    return f"{origin}. Or it is {total}" if total else origin


def _sum_words(factor: float, comparison: Comparison, ours: Update, theirs: Update) -> str:
    """Say that a loss is a sum over samples where the factor is what becomes of one; empty where it is not."""
    if ours.summed != theirs.summed:
        side, other = ("A", "B") if ours.summed else ("B", "A")
        return f"a loss of {side} is a sum over its targets (reduction='sum'), that of {other} is not"
    passes = [
        trace.ranks * max(update.micro_batches, 1) for trace, update in ((comparison.a, ours), (comparison.b, theirs))
    ]
    if passes[0] == passes[1] or not math.isclose(factor, passes[0] / passes[1], rel_tol=1e-3):
        return ""
    return (
        f"a sum over the samples of a pass (reduction='sum'), and the mean over ranks and micro batches is taken of {passes[0]} such "
        f"sum(s) in A and {passes[1]} in B: train the mean over samples, or multiply by the number of passes"
    )


def _origin_words(front: str, factor: float, comparison: Comparison, theirs: Update, ours: Update, what: str) -> str:
    """Say what a whole factor may come from, among the numbers of ranks and micro batches."""
    ranks = {comparison.a.ranks, comparison.b.ranks} - {1}
    passes = {ours.micro_batches, theirs.micro_batches} - {1}
    size = factor if factor > 1 else 1 / factor
    if size in passes and size in ranks:
        front = f"{front}, and there are {size:g} micro batches and {size:g} ranks"
        if factor > 1:
            return f"{front}: not divided by the one, or multiplied by the other"
        return f"{front}: divided by one of these numbers twice, or on one side only"
    if size in passes:
        if factor > 1:
            return f"{front}: the loss is not divided by the {size:g} micro batches of an update"
        return f"{front}: the loss is divided by the {size:g} micro batches twice, or on one side only"
    if size in ranks:
        if factor > 1:
            return f"{front}, as many times as there are ranks: summed over ranks and not averaged, or multiplied by their number"
        return f"{front}, one part for each rank: averaged twice, or divided by the ranks besides"
    if product := steps.name_factor(size, max(ranks, default=1), max(passes, default=1)):
        return f"{front}, {product}: summed where the mean is meant, or divided once too often"
    if what == "loss":
        return f"{front}: another reduction (sum or mean), or a weight of the loss"
    kept = "gradients of before were kept (zero_grad is missing), or " if theirs.number > 1 else ""
    return f"{front}: {kept}the loss is scaled and not unscaled"


def _short_window(factor: float, comparison: Comparison, ours: Update, theirs: Update) -> str:
    """Say where an update has fewer micro batches than the others and is divided by their number still; else nothing."""
    sides = (("B", comparison.b, theirs, factor), ("A", comparison.a, ours, 1 / factor))
    for side, trace, update, share in sides:
        usual = trace.updates[0].micro_batches
        if update.micro_batches < usual and math.isclose(share, update.micro_batches / usual, rel_tol=1e-2):
            return (
                f"this update of {side} has {update.micro_batches} micro batches where the others have {usual}, at the end of an "
                f"epoch, and its loss is divided by {usual} still"
            )
    return ""


def _shown_factor(factor: float) -> str:
    return f"{factor:g} times" if factor > 1 else f"1/{1 / factor:g} of"


def factor_of(x: np.ndarray | None, y: np.ndarray | None) -> float | None:
    """Return the factor by which the array of sketch ``y`` is that of ``x``; None where no factor explains it."""
    if x is None or y is None or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    factor = float(x @ y / (x @ x)) if x.any() else 0.0
    remainder = float(np.linalg.norm(y - factor * x))
    return factor if factor and remainder <= EXPLAINED * float(np.linalg.norm(y)) else None


def whole_factor(factor: float) -> float | None:
    """Return a factor that is a whole number from 2, or one part of it, exactly; None for others."""
    for candidate in (factor, 1 / factor if factor else math.nan):
        if math.isfinite(candidate) and candidate > 1.5 and abs(candidate - round(candidate)) < 1e-3 * candidate:
            return float(round(candidate)) if candidate == factor else 1.0 / round(candidate)
    return None


def before_clipping(update: Update) -> np.ndarray | None:
    """Return the sketch of the gradient before it was clipped; None where it was not recorded."""
    row, clip = update.parts.get("gradients"), update.clip
    if row is None:
        return None
    if not math.isfinite(row.norm):
        return np.full(len(row.sketch), math.nan)
    # Clipping has shortened the gradient on one side more than on the other; undone, both are comparable.
    scale = clip["before"] / row.norm if clip is not None and row.norm and clip["before"] > clip["limit"] else 1.0
    return np.asarray(row.sketch) * (scale if math.isfinite(scale) else math.nan)
