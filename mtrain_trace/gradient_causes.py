"""Name the likely cause of another loss or gradient, at the same weights, samples and labels.

Sketches are linear: a gradient that is twice as large leaves no remainder when the other one is doubled, and this is how a
wrong factor is told from a wrong gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from mtrain_trace import differences, steps
from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.differences import some
from mtrain_trace.reading import Update

EXPLAINED = 0.02
"""Largest remainder that a factor may leave, relative to the length of what it explains."""


def loss(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain a loss that differs at the same weights, samples and labels."""
    others = of_one_side("losses", ours.loss_parts, theirs.loss_parts)
    if others:
        return [others]
    sentences = []
    frozen_a, frozen_b = (update.modes[0] if update.modes else 0 for update in (ours, theirs))
    if frozen_a != frozen_b:
        side, count = ("B", frozen_b) if frozen_b > frozen_a else ("A", frozen_a)
        sentences.append(
            f"{count} modules of {side} are in evaluation mode, {min(frozen_a, frozen_b)} of the other: model.train() is missing "
            "after an evaluation, or parts are put into eval() on one side"
        )
    factor = theirs.loss / ours.loss if ours.loss else math.nan
    whole = _whole_factor(factor)
    if whole is not None:
        words = _factor_words(whole, comparison, theirs, ours, what="loss")
        sentences.append(words)
    if not sentences and _has(comparison, "batch_norms") and _samples_of_a_pass(ours) != _samples_of_a_pass(theirs):
        sentences.append(
            f"BatchNorm takes its statistics from {_samples_of_a_pass(ours)} samples in A and {_samples_of_a_pass(theirs)} in B: those "
            "of one rank and one micro batch; use SyncBatchNorm, or compare trainings with the same micro batches"
        )
    if not sentences and _has(comparison, "dropouts"):
        sentences += _random_numbers(ours, theirs)
    if not sentences and _is_mean_of_means(ours, theirs):
        sentences.append(_means_words(ours, theirs))
    if not sentences and parting.update == 1:
        sentences.append(
            "start weights, samples and labels are the same, the loss is not: the loss is computed otherwise (reduction, weights, "
            "label smoothing, padding that is counted) or a layer (a mask, an activation, an epsilon), in another precision"
            + _chances(
                comparison,
                ours,
                theirs,
                norms=", or with BatchNorm over other samples (those of a rank, a micro batch)",
            )
        )
    elif not sentences:
        sentences.append(
            "the loss parts although the weights agreed before: what a model carries from update to update has parted (a hidden state, "
            "a queue, a teacher)"
            + _chances(
                comparison, ours, theirs, norms=", or buffers (BatchNorm) in a forward pass that is not recorded"
            )
        )
    return sentences


def _chances(comparison: Comparison, ours: Update, theirs: Update, *, norms: str) -> str:
    """Return further causes of another loss that the models and the states of random numbers do not exclude."""
    words = norms if _has(comparison, "batch_norms") else ""
    known = all("dropouts" in process for trace in (comparison.a, comparison.b) for process in trace.processes)
    is_drawing = _has(comparison, "dropouts") or not known or ours.rng != theirs.rng
    return words + (", or random numbers (dropout, noise) are drawn in another order" if is_drawing else "")


def of_one_side(what: str, ours: Collection[str], theirs: Collection[str]) -> str:
    """Name what B alone lacks or has; empty where both have the same, or one has recorded none."""
    missing, further = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
    if not ours or not theirs or not (missing or further):
        return ""
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(further)} besides"] if further else []
    return f"its {what} are others: it {' and '.join(parts)}; a part of the recipe is not applied"


def _is_mean_of_means(ours: Update, theirs: Update) -> bool:
    """Return whether a loss of few passes may be that of more passes under other weights: it lies among their losses."""
    few, many = sorted((ours, theirs), key=lambda update: len(update.pass_losses))
    if len(few.pass_losses) == len(many.pass_losses) or not ours.samples or not math.isfinite(few.loss):
        return False
    whole = [
        loss * many.micro_batches for loss in many.pass_losses
    ]  # each was divided by the micro batches of its rank
    return min(whole) < few.loss < max(whole)


def _means_words(ours: Update, theirs: Update) -> str:
    return (
        f"a mean of means: the loss of A is the mean of {len(ours.pass_losses)} pass(es), that of B of {len(theirs.pass_losses)} "
        "(ranks and micro batches), and each pass divides by its own number of labels (tokens, boxes, pixels); where these "
        "numbers differ, a label counts more in a pass that has few. Divide by the number in the whole update"
    )


def _has(comparison: Comparison, what: str) -> bool:
    return any(process.get(what) for trace in (comparison.a, comparison.b) for process in trace.processes)


def _samples_of_a_pass(update: Update) -> int:
    """Return the samples of one forward pass of the first rank."""
    return len(update.rank_samples[0]) // max(update.micro_batches, 1) if update.rank_samples else 0


def _random_numbers(ours: Update, theirs: Update) -> list[str]:
    """Say what differs in the states of the random numbers, from which dropout draws."""
    for side, update, other in (("B", theirs, ours), ("A", ours, theirs)):
        states = [state for state in update.rng if state]
        if len(states) > 1 and len(set(states)) == 1 and len(set(other.rng)) > 1:
            return [
                f"all ranks of {side} draw the same random numbers: dropout leaves out the same elements on each (one seed for all)"
            ]
    if ours.rng != theirs.rng and all(ours.rng) and all(theirs.rng):
        return [
            "the random numbers are in another state, from which dropout draws: another seed, or draws that one side alone makes"
        ]
    return [
        "the model has dropout, whose draws depend on how samples are divided among ranks and passes; compare with dropout 0"
    ]


def skipped(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain an update that one side alone has skipped."""
    side, other = ("B", "A") if theirs.skipped else ("A", "B")
    return [
        f"{side} has skipped this update, {other} has made it: the gradient scaler of {side} has found a gradient that is not finite; "
        "its scale is too large at first (init_scale) or the format too narrow. Every skipped update is missing in the training, "
        "while schedules and counters may go on"
    ]


def gradient(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain a gradient, or its clipping, that differs at the same loss."""
    sentences = []
    for side, update, _trace in (("B", theirs, comparison.b), ("A", ours, comparison.a)):
        if update.ranks_agree.get("gradients") is False:
            sentences.append(
                f"the ranks of {side} do not have the same gradients when the optimizer uses them: they are not exchanged "
                "(no_sync around the last micro batch, a model, tape or optimizer that is not wrapped, parameters that DDP does not know), "
                "or they are clipped or scaled on each rank before the exchange"
            )
    if sentences:
        return sentences
    if math.isinf(parting.size) and ("gradients" in ours.parts) != ("gradients" in theirs.parts):
        side = "A" if "gradients" in theirs.parts else "B"
        return [
            f"no array that the optimizer of {side} holds has a gradient: they are frozen (requires_grad), detached, or belong to "
            "another model than the one that is trained"
        ]
    place = parting.place or 0
    missing = set(ours.arrays.get("gradients", {})) ^ set(theirs.arrays.get("gradients", {}))
    if missing:
        return [
            f"one side alone has a gradient of {some(sorted(missing))}: a part that is frozen, detached or not used"
        ]
    kept = place and _kept(comparison.b.updates[place - 1], ours, theirs)
    if kept:
        return [
            f"the gradient of B holds that of update {theirs.number - 1} too: gradients are not cleared (zero_grad is missing)"
        ]
    if "gradients" not in ours.parts or "gradients" not in theirs.parts:
        return [_norms(comparison, ours, theirs)]
    scaled = _clipped_while_scaled(ours, theirs)
    if scaled:
        return [scaled]
    factor = factor_of(_unclipped(ours), _unclipped(theirs))
    whole = None if factor is None else _whole_factor(factor)
    if whole is not None:
        return [_factor_words(whole, comparison, theirs, ours, what="gradient")]
    clipped = _clipped(theirs, ours)
    if clipped:
        return [clipped]
    if factor is not None and abs(factor - 1) > EXPLAINED:
        return [f"the gradient of B is {factor:.4g} times that of A, in the same direction"]
    return [_partial(comparison, parting, ours, theirs)]


def _norms(comparison: Comparison, ours: Update, theirs: Update) -> str:
    """Explain gradients of which only the lengths are known on both sides."""
    mine, other = ours.norm_before or 0.0, theirs.norm_before or 0.0
    whole = _whole_factor(other / mine) if mine else None
    if whole is not None:
        return _factor_words(whole, comparison, theirs, ours, what="gradient")
    return (
        f"the loss is the same and the gradient norm is not ({other:.4g} instead of {mine:.4g}): look at the exchange between "
        "ranks, at micro batches that are left out, at the scaling of the loss"
    )


def _unclipped(update: Update) -> np.ndarray | None:
    """Return the sketch of the gradient before it was clipped; None where it was not recorded."""
    row, clip = update.parts.get("gradients"), update.clip
    if row is None:
        return None
    scale = clip["before"] / row.norm if clip is not None and row.norm and clip["before"] > clip["limit"] else 1.0
    return np.asarray(row.sketch) * scale


def _kept(before: Update, ours: Update, theirs: Update) -> bool:
    """Return whether B's gradient is A's and, besides, the one that B has used in the update before."""
    used, mine, other = before.parts.get("gradients"), _unclipped(ours), _unclipped(theirs)
    if used is None or mine is None or other is None:
        return False
    # What is kept is clipped where clipping writes into the gradients (torch, Paddle 3), and whole where it does not.
    factors = [factor_of(gradient, other - mine) for gradient in (np.asarray(used.sketch), _unclipped(before))]
    return any(factor is not None and abs(factor - 1) < 0.05 for factor in factors)


def _clipped(theirs: Update, ours: Update) -> str | None:
    """Say what differs in clipping; None where nothing does."""
    mine, other = ours.clip, theirs.clip
    if (
        not ours.clips
        or not theirs.clips
        or mine == other
        or not any(clip and clip["before"] > clip["limit"] for clip in (mine, other))
    ):
        return None
    if mine is None and other is not None:
        return f"B clips the gradient to a norm of {other['limit']:g} (it was {other['before']:.4g}), A does not clip"
    if mine is not None and other is None:
        return f"A clips the gradient to a norm of {mine['limit']:g} (it was {mine['before']:.4g}), B does not, or by a function of its own"
    if mine is None or other is None:
        return None
    if mine["limit"] != other["limit"]:
        return f"A clips to a norm of {mine['limit']:g}, B to {other['limit']:g}"
    used = theirs.norm
    if used is not None and used > other["limit"] * 1.01 and other["before"] > other["limit"]:
        return (
            f"B clips to a norm of {other['limit']:g}, but uses a gradient of norm {used:.4g}: it is clipped before it is exchanged, "
            "or before it is unscaled"
        )
    if max(len(ours.rank_samples), len(theirs.rank_samples)) < 2:
        return None  # nothing is exchanged: the gradient itself differs
    before, used_a = relative_clip(mine, ours), relative_clip(other, theirs)
    if before is not None and used_a is not None and differences.relative(mine["before"], other["before"]) > EXPLAINED:
        return (
            f"the norms before clipping are {mine['before']:.4g} and {other['before']:.4g}: the gradient is clipped before the "
            "exchange, or other arrays are counted"
        )
    return None


def _clipped_while_scaled(ours: Update, theirs: Update) -> str:
    """Name clipping of gradients that a scaler has multiplied: less is left of them by just that factor; else nothing."""
    mine, other = ours.clip, theirs.clip
    if not mine or not other or not mine["before"] or not other["limit"] or theirs.norm is None:
        return ""
    factor = other["before"] / mine["before"]
    is_power = factor > 1.5 and abs(math.log2(factor) - round(math.log2(factor))) < 1e-2
    if not is_power or abs(theirs.norm * factor / min(other["limit"], other["before"]) - 1) > EXPLAINED:
        return ""
    return (
        f"B clips the gradient while it is {round(factor)} times as large, before it is unscaled (scaler.unscale_ is missing): the limit "
        "is that of the scaled gradient, and little is left of it"
    )


def relative_clip(clip: dict[str, float], update: Update) -> float | None:
    """Return the norm that was used relative to the norm before clipping; None where either is not known."""
    return update.norm / clip["before"] if update.norm is not None and clip["before"] else None


def _partial(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> str:
    total = len(ours.arrays.get("gradients", {}))
    known = _lost_in_a_gather(comparison, ours, theirs) or _frontier(ours, theirs)
    if known:
        return known
    if parting.arrays and len(parting.arrays) <= max(1, total // 2):
        return (
            f"the loss is the same, the gradients of {len(parting.arrays)} of {total} arrays are not ({some(parting.arrays)}): a part "
            "is detached, frozen, or scaled on one side"
        )
    if comparison.b.ranks > 1 or comparison.a.ranks > 1:
        return (
            f"the loss is the same, the gradient is not, in no constant factor: {_lost(ours, theirs)}ranks are weighted otherwise "
            "(unequal batches, a mean over ranks of means over tokens), or statistics over the batch (BatchNorm) see one rank's "
            "samples only"
        )
    return (
        f"the loss is the same, the gradient is not, in no constant factor: {_lost(ours, theirs)}"
        + ("gradients of before were kept (zero_grad), or " if theirs.number > 1 else "")
        + "a part of the backward pass differs"
        + _further_losses(comparison)
    )


def _further_losses(comparison: Comparison) -> str:
    if len(comparison.b.processes[0]["optimizers"]) < 2:
        return ""
    return ", or the backward pass of another loss reaches these arrays (a detach is missing)"


def _lost_in_a_gather(comparison: Comparison, ours: Update, theirs: Update) -> str:
    """Name gradients of which one part for each rank is left, beside others that are whole; else nothing."""
    mine, other = (update.arrays.get("gradients", {}) for update in (ours, theirs))
    ranks = max(comparison.a.ranks, comparison.b.ranks)
    if ranks < 2 or set(mine) != set(other):
        return ""
    factors = {name: factor_of(np.asarray(mine[name].sketch), np.asarray(other[name].sketch)) for name in mine}
    parts = {1 / ranks: "1/" + str(ranks) + " of", float(ranks): f"{ranks} times"}
    for part, words in parts.items():
        held = [name for name, factor in factors.items() if factor is not None and abs(factor / part - 1) < EXPLAINED]
        rest = [name for name, factor in factors.items() if factor is not None and abs(factor - 1) < EXPLAINED]
        if held and rest and len(held) + len(rest) == len(factors):
            return (
                f"the loss is the same, and the gradients of {some(held)} in B are {words} those in A, those of {some(rest)} the same: "
                "outputs of other ranks enter the loss on one side without their gradient (a gather that is not differentiated), or "
                "these arrays alone are averaged or summed over the ranks"
            )
    return ""


def _frontier(ours: Update, theirs: Update) -> str:
    """Say between which arrays the backward pass parts: from there to the front of the model gradients differ; else nothing."""
    mine, other = (update.arrays.get("gradients", {}) for update in (ours, theirs))
    names = [name for group in ours.groups for name in group if name in mine and name in other]
    same = [differences.apart(mine[name], other[name]) < 1e-5 for name in names]
    if len(ours.groups) != 1 or not any(same) or all(same):
        return ""
    first = same.index(True)
    if first == 0 or not all(same[first:]):
        return ""
    return (
        f"the loss is the same, and so are the gradients from {names[first]} on to the output; those of {names[first - 1]} and of all "
        "before it differ: the backward pass parts between these two (a function of its own, a detach, a hook)"
    )


def _lost(ours: Update, theirs: Update) -> str:
    """Say first that gradients of micro batches may be lost, where one side alone has several."""
    if (ours.micro_batches > 1) == (theirs.micro_batches > 1):
        return ""
    side, update = ("B", theirs) if theirs.micro_batches > 1 else ("A", ours)
    return f"{side} does not use the gradients of all its {update.micro_batches} micro batches (only the last one counts), "


def _factor_words(factor: float, comparison: Comparison, theirs: Update, ours: Update, *, what: str) -> str:
    """Say what a whole factor between two losses or gradients may come from."""
    front = f"the {what} of B is {_shown_factor(factor)} that of A"
    rest = _short_window(factor, comparison, ours, theirs)
    if rest:
        return f"{front}: {rest}"
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
    product = steps.named_factor(size, max(ranks, default=1), max(passes, default=1))
    if product:
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
    if x is None or y is None:
        return None
    factor = float(x @ y / (x @ x)) if x.any() else 0.0
    remainder = float(np.linalg.norm(y - factor * x))
    return factor if factor and remainder <= EXPLAINED * float(np.linalg.norm(y)) else None


def _whole_factor(factor: float) -> float | None:
    """Return a factor that is a whole number from 2, or one part of it, exactly; None for others."""
    for candidate in (factor, 1 / factor if factor else math.nan):
        if math.isfinite(candidate) and candidate > 1.5 and abs(candidate - round(candidate)) < 1e-3 * candidate:
            return float(round(candidate)) if candidate == factor else 1.0 / round(candidate)
    return None
