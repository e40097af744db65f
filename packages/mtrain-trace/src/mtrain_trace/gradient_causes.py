"""Name the likely cause of another gradient, or another clipping, at the same weights, samples, labels and loss."""

from __future__ import annotations

import math

import numpy as np

from mtrain_trace import differences, factors
from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.differences import some
from mtrain_trace.reading import Update


def gradient(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain a gradient, or its clipping, that differs at the same loss, or nearly so."""
    sentences, apart = _causes(comparison, parting, ours, theirs), differences.relative(ours.loss, theirs.loss)
    if not apart > 3e-7:  # the last digits of float32
        return sentences
    # The rules below are worded for an equal loss.
    near, part = f"the loss is nearly the same ({apart:.0e} apart)", "a part of the backward pass"
    both = "a part of the forward pass that the loss hardly shows (an activation, an epsilon) or of the backward pass"
    return [text.replace("the loss is the same", near).replace(part, both) for text in sentences]


def _causes(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
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
    # The order is from the certain to the likely: each rule assumes that those above it do not hold.
    if known := _find_unused(parting, ours, theirs) or _explain_early_clip(ours, theirs):
        return [known]
    place = parting.place or 0
    if missing := set(ours.arrays.get("gradients", {})) ^ set(theirs.arrays.get("gradients", {})):
        return [
            f"one side alone has a gradient of {some(sorted(missing))}: a part that is frozen, detached or not used"
        ]
    if place and _is_kept(comparison.b.updates[place - 1], ours, theirs):
        return [
            f"the gradient of B holds that of update {theirs.number - 1} too: gradients are not cleared (zero_grad is missing)"
        ]
    if "gradients" not in ours.parts or "gradients" not in theirs.parts:
        return [_norms(comparison, ours, theirs)]
    if scaled := _explain_clip_while_scaled(ours, theirs):
        return [scaled]
    factor = factors.factor_of(factors.before_clipping(ours), factors.before_clipping(theirs))
    # Whole factors are numbers of ranks or passes; others are told as they are.
    whole = None if factor is None else factors.whole_factor(factor)
    if whole is not None:
        return [factors.factor_words(whole, comparison, theirs, ours, what="gradient")]
    if clipped := _compare_clipping(theirs, ours):
        return [clipped]
    if factor is not None and abs(factor - 1) > factors.EXPLAINED:
        return [f"the gradient of B is {factor:.4g} times that of A, in the same direction"]
    return [_partial(comparison, parting, ours, theirs)]


def _find_unused(parting: Parting, ours: Update, theirs: Update) -> str:
    """Name an optimizer that has no gradient, or none but zeros; empty where both sides have some."""
    has_one_none = math.isinf(parting.size) and ("gradients" in ours.parts) != ("gradients" in theirs.parts)
    for side, update in (("B", theirs), ("A", ours)):
        if update.cleared and (update.norm == 0 or (has_one_none and "gradients" not in update.parts)):
            return f"{side} clears its gradients (zero_grad) after the backward pass and before the step: the optimizer has none to use"
    if not has_one_none:
        return ""
    return (
        f"no array that the optimizer of {'A' if 'gradients' in theirs.parts else 'B'} holds has a gradient: they are frozen "
        "(requires_grad), detached, cleared before the step, or belong to another model than the one that is trained"
    )


def _explain_early_clip(ours: Update, theirs: Update) -> str:
    """Name clipping before the backward passes whose gradient it is meant for; empty where there is none."""
    for side, clip, other, update in (("B", theirs.clip, ours.clip, theirs), ("A", ours.clip, theirs.clip, ours)):
        is_early = clip and (clip.get("early") or (clip["before"] == 0 and (update.norm or 0) > 0))
        if is_early and not (other and other.get("early")):
            return (
                f"{side} clips before the backward pass of the update has ended: what is added afterwards is not clipped; clip between the "
                "last backward pass and the step"
            )
    return ""


def _norms(comparison: Comparison, ours: Update, theirs: Update) -> str:
    """Explain gradients of which only the lengths are known on both sides."""
    mine, other = ours.norm_before or 0.0, theirs.norm_before or 0.0
    whole = factors.whole_factor(other / mine) if mine else None
    if whole is not None:
        return factors.factor_words(whole, comparison, theirs, ours, what="gradient")
    return (
        f"the loss is the same and the gradient norm is not ({other:.4g} instead of {mine:.4g}): look at the exchange between "
        "ranks, at micro batches that are left out, at the scaling of the loss"
    )


def _is_kept(before: Update, ours: Update, theirs: Update) -> bool:
    """Return whether B's gradient is A's and, besides, the one that B has used in the update before."""
    used, mine, other = before.parts.get("gradients"), factors.before_clipping(ours), factors.before_clipping(theirs)
    if used is None or mine is None or other is None:
        return False
    # What is kept is clipped where clipping writes into the gradients (torch, Paddle 3), and whole where it does not.
    found = [
        factors.factor_of(gradient, other - mine)
        for gradient in (np.asarray(used.sketch), factors.before_clipping(before))
    ]
    return any(factor is not None and abs(factor - 1) < 0.05 for factor in found)


def _compare_clipping(theirs: Update, ours: Update) -> str | None:
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
    if (
        before is not None
        and used_a is not None
        and differences.relative(mine["before"], other["before"]) > factors.EXPLAINED
    ):
        return (
            f"the norms before clipping are {mine['before']:.4g} and {other['before']:.4g}: the gradient is clipped before the "
            "exchange, or other arrays are counted"
        )
    return None


def _explain_clip_while_scaled(ours: Update, theirs: Update) -> str:
    """Name clipping of gradients that a scaler has multiplied: less is left of them by just that factor; else nothing."""
    mine, other = ours.clip, theirs.clip
    if not mine or not other or not mine["before"] or not other["limit"] or theirs.norm is None:
        return ""
    factor = other["before"] / mine["before"]
    is_power = 1.5 < factor < math.inf and abs(math.log2(factor) - round(math.log2(factor))) < 1e-2
    if not is_power or abs(theirs.norm * factor / min(other["limit"], other["before"]) - 1) > factors.EXPLAINED:
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
    if known := _lost_in_a_gather(comparison, ours, theirs) or _frontier(ours, theirs):
        return known
    if parting.arrays and len(parting.arrays) <= max(1, total // 2):
        pairs = [[update.arrays["gradients"][name] for update in (ours, theirs)] for name in parting.arrays]
        found = [factors.factor_of(np.asarray(x.sketch), np.asarray(y.sketch)) for x, y in pairs]
        why = "a part is detached, frozen, or scaled on one side"
        if None in found and all(x.norm and y.norm for x, y in pairs):
            why = "in no constant factor: a part of the backward pass differs, or they are changed after it (clipped by value)"
        return f"the loss is the same, the gradients of {len(pairs)} of {total} arrays are not ({some(parting.arrays)}): {why}"
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
    by_name = {name: factors.factor_of(np.asarray(mine[name].sketch), np.asarray(other[name].sketch)) for name in mine}
    parts = {1 / ranks: "1/" + str(ranks) + " of", float(ranks): f"{ranks} times"}
    for part, words in parts.items():
        held = [
            name
            for name, factor in by_name.items()
            if factor is not None and abs(factor / part - 1) < factors.EXPLAINED
        ]
        rest = [name for name, factor in by_name.items() if factor is not None and abs(factor - 1) < factors.EXPLAINED]
        if held and rest and len(held) + len(rest) == len(by_name):
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
