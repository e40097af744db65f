"""Name the likely cause of another loss, at the same weights, samples and labels."""

from __future__ import annotations

import math
from collections.abc import Collection
from fractions import Fraction

from mtrain_trace import factors
from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.reading import Update
from mtrain_trace.recorder import ZEROS

SAME_FACTOR = 1e-3
"""Largest relative difference of two factors that are one; a factor nearer to 1 is none."""
TOTAL = "total"
"""Name of the whole among the parts of a loss."""
LARGEST_COUNT = 256
"""Largest denominator of a factor that is shown as a fraction."""


def loss(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain a loss that differs at the same weights, samples and labels."""
    if others := of_one_side("losses", ours.loss_parts, theirs.loss_parts):
        return [others]
    if bool(ours.micro_batches) != bool(theirs.micro_batches):
        return [_no_pass(ours, theirs)]
    sentences = [*_states(comparison, parting, ours, theirs)]
    frozen_a, frozen_b = (update.modes[0] if update.modes else 0 for update in (ours, theirs))
    if frozen_a != frozen_b:
        side, count = ("B", frozen_b) if frozen_b > frozen_a else ("A", frozen_a)
        sentences.append(
            f"{count} modules of {side} are in evaluation mode, {min(frozen_a, frozen_b)} of the other: model.train() is missing "
            "after an evaluation, or parts are put into eval() on one side"
        )
    sentences += _of_parts(comparison, ours, theirs)
    factor = theirs.loss / ours.loss if ours.loss else math.nan
    # A factor beside another cause would be an accident.
    whole = None if sentences else factors.whole_factor(factor)
    if whole is not None:
        words = factors.factor_words(whole, comparison, theirs, ours, what="loss")
        sentences.append(words)
    if not sentences and _has(comparison, "batch_norms") and _samples_of_a_pass(ours) != _samples_of_a_pass(theirs):
        sentences.append(
            f"BatchNorm takes its statistics from {_samples_of_a_pass(ours)} samples in A and {_samples_of_a_pass(theirs)} in B: those "
            "of one rank and one micro batch; use SyncBatchNorm, or compare trainings with the same micro batches"
        )
    if not sentences and _has(comparison, "dropouts"):
        sentences += _random_numbers(comparison, ours, theirs)
    if not sentences:
        sentences += _find_scaled(factor, ours, theirs)
    if not sentences and _is_mean_of_means(ours, theirs):
        sentences.append(
            f"the loss depends on which samples share a pass; that of A is the mean of {len(ours.pass_losses)} pass(es), that of B of "
            f"{len(theirs.pass_losses)} (ranks and micro batches). It is a mean of means if each pass divides by its own number of labels "
            "(tokens, boxes, pixels): a label counts more in a pass that has few; divide by the number in the whole update. Otherwise "
            "something mixes the samples of a pass: a softmax or a mean over the axis of samples (dim=0), a loss over pairs"
        )
    if not sentences:
        sentences += _but_first_rank(ours, theirs)
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
            "the loss parts although the weights that the optimizer holds agreed before: what it does not hold has parted (a layer made "
            "after the optimizer), what a model carries from update to update (a hidden state, a queue, a teacher), or how the loss is "
            "computed from here on"
            + _chances(
                comparison, ours, theirs, norms=", or buffers (BatchNorm) in a forward pass that is not recorded"
            )
        )
    return sentences


def _no_pass(ours: Update, theirs: Update) -> str:
    """Say that an optimizer has stepped without a loss of its own."""
    side = "A" if theirs.micro_batches else "B"
    return (
        f"the optimizer of {side} steps here without a backward pass since its last step: its step is called twice, or its gradients are "
        "those of a loss that belongs to another optimizer"
    )


def _states(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Say how the state differs with which recurrent layers begin; nothing where it is the same, or there is none."""
    mine, other = (set(update.states) - {None} for update in (ours, theirs))
    if not mine or not other or mine == other:
        return []
    for side, rest, states, further in (("B", "A", other, mine), ("A", "B", mine, other)):
        if ZEROS in states and ZEROS not in further:
            resumed = parting.place == 0 and (comparison.a.earlier or comparison.b.earlier)
            why = (
                "it was not saved, or not loaded, at the resume"
                if resumed
                else "it is not carried from update to update, or is reset here"
            )
            return [
                f"the recurrent layers of {side} begin this update with a hidden state of zeros, those of {rest} with one of before: {why}"
            ]
    if len(ours.states) != len(theirs.states) or ours.micro_batches != theirs.micro_batches:
        return []  # parts of one state have other digests than the whole
    if comparison.bits_until < (parting.place or 0):
        return []  # once weights differ by rounding, so do all states that they have computed
    return [
        "the recurrent layers of A and B begin this update with other hidden states: of another update, of other samples, or reset on "
        "one side"
    ]


def _find_scaled(factor: float, ours: Update, theirs: Update) -> list[str]:
    """Say that loss and gradient differ by the same factor, which is no whole number; nothing where they do not."""
    of_gradient = factors.factor_of(factors.before_clipping(ours), factors.before_clipping(theirs))
    if (
        of_gradient is None
        or not factor
        or not math.isfinite(factor)
        or not abs(of_gradient / factor - 1) < SAME_FACTOR < abs(factor - 1)
    ):
        return []
    # Numbers of labels are small, so a fraction shows which two were used.
    ratio = Fraction(factor).limit_denominator(LARGEST_COUNT)
    exact = f" ({ratio})" if abs(float(ratio) / factor - 1) < 1e-6 else ""
    return [
        f"the loss of B is {factor:.6g} times that of A{exact}, and so is its gradient: the same sum is divided by another number (of "
        "labels, where padding or the shift of labels is counted on one side; of samples), or weighted"
    ]


def _chances(comparison: Comparison, ours: Update, theirs: Update, *, norms: str) -> str:
    """Return further causes of another loss that the models and the states of random numbers do not exclude."""
    words = norms if _has(comparison, "batch_norms") else ""
    # Older traces do not say whether a model has dropout.
    known = all("dropouts" in process for trace in (comparison.a, comparison.b) for process in trace.processes)
    is_drawing = _has(comparison, "dropouts") or not known or set(ours.rng) != set(theirs.rng)
    return words + (", or random numbers (dropout, noise) are drawn in another order" if is_drawing else "")


def of_one_side(what: str, ours: Collection[str], theirs: Collection[str]) -> str:
    """Name what B alone lacks or has; empty where both have the same, or one has recorded none."""
    missing, further = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
    if not ours or not theirs or not (missing or further):
        return ""
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(further)} besides"] if further else []
    return f"its {what} are others: it {' and '.join(parts)}; a part of the recipe is not applied"


def _of_parts(comparison: Comparison, ours: Update, theirs: Update) -> list[str]:
    """Name the losses, of several models or terms, that differ by a whole factor; nothing where all do, or none does."""
    names = [name for name in ours.loss_parts if name != TOTAL and name in theirs.loss_parts]
    found = {}
    for name in names:
        mine, other = ours.loss_parts[name], theirs.loss_parts[name]
        factor = factors.whole_factor(other / mine) if mine else None
        if factor is not None:
            found[name] = factor
    if len(names) < 2 or len(found) == len(names):
        return []
    sentences = []
    for name, factor in found.items():
        words = factors.factor_words(factor, comparison, theirs, ours, what="loss", name=name)
        model = name.removeprefix("loss_")
        before, after = (update.model_norms.get(model, math.nan) for update in (ours, theirs))
        if before and abs(after / before / factor - 1) < factors.EXPLAINED:
            words += f"; the gradient of model {model} is {factor:.4g} times as long too"
        sentences.append(words)
    return sentences


def _but_first_rank(ours: Update, theirs: Update) -> list[str]:
    """Say that the first rank has the same loss and further ones have not; nothing where that is not so."""
    if len(ours.losses) != len(theirs.losses) or len(ours.losses) < 2:
        return []
    apart = [abs(other - mine) > SAME_FACTOR * abs(mine) for mine, other in zip(ours.losses, theirs.losses)]
    if apart[0] or not any(apart):
        return []
    which = [str(rank) for rank, differs in enumerate(apart) if differs]
    return [
        f"the loss of rank 0 is the same, and that of rank{'s' if len(which) > 1 else ''} {', '.join(which)} is not: what a rank works out "
        "from its own number differs (positions or labels that forget to begin at the rank's part of what is gathered, a mask, an offset)"
    ]


def _is_mean_of_means(ours: Update, theirs: Update) -> bool:
    """Return whether a loss of few passes may be that of more passes under other weights: it lies among their losses."""
    few, many = sorted((ours, theirs), key=lambda update: len(update.pass_losses))
    if len(few.pass_losses) == len(many.pass_losses) or not ours.samples or not math.isfinite(few.loss):
        return False
    whole = [
        loss * many.micro_batches for loss in many.pass_losses
    ]  # each was divided by the micro batches of its rank
    return min(whole) < few.loss < max(whole)


def _has(comparison: Comparison, what: str) -> bool:
    return any(process.get(what) for trace in (comparison.a, comparison.b) for process in trace.processes)


def _samples_of_a_pass(update: Update) -> int:
    """Return the samples of one forward pass of the first rank."""
    return len(update.rank_samples[0]) // max(update.micro_batches, 1) if update.rank_samples else 0


def _random_numbers(comparison: Comparison, ours: Update, theirs: Update) -> list[str]:
    """Say what differs in dropout and the random numbers that it draws; nothing where as much as is known agrees."""
    for side, update, other in (("B", theirs, ours), ("A", ours, theirs)):
        states = [state for state in update.rng if state]
        if len(states) > 1 and len(set(states)) == 1 and len(set(other.rng)) > 1:
            return [
                f"all ranks of {side} draw the same random numbers: dropout leaves out the same elements on each (one seed for all)"
            ]
    rates = [trace.processes[0].get("dropout_rates") for trace in (comparison.a, comparison.b)]
    if None not in rates and rates[0] != rates[1]:
        return [f"dropout leaves out other shares (p {rates[0]} in A, {rates[1]} in B)"]
    divided = _explain_division(comparison, ours, theirs)
    seeds = [update.seeds[0] if update.seeds else None for update in (ours, theirs)]
    if divided and (None in seeds or seeds[0] == seeds[1]):
        return [_explain_draws(divided, seeds[0], ours, theirs)]
    if divided:
        return [
            f"the model has dropout, and its random numbers begin with another seed (of the first rank {seeds[0]} in A, {seeds[1]} in B); "
            f"with one seed they would differ too, because dropout draws for {divided}. Compare with dropout 0"
        ]
    if ours.rng != theirs.rng and all(ours.rng) and all(theirs.rng):
        return [
            "the random numbers are in another state, from which dropout draws: another seed, or draws that one side alone makes"
        ]
    return []


def _explain_division(comparison: Comparison, ours: Update, theirs: Update) -> str:
    """Say over how many ranks or passes an update is divided, where A and B differ in that; empty where they do not."""
    counts = []
    for trace, update in ((comparison.a, ours), (comparison.b, theirs)):
        passes = max(update.micro_batches, 1)
        each = f", {passes} micro batches each" if passes > 1 else ""
        counts.append((trace.ranks, passes, f"{trace.ranks} rank{'s' if trace.ranks > 1 else ''}{each}"))
    if counts[0][:2] == counts[1][:2]:
        return ""
    sizes = [_samples_of_a_pass(update) for update in (ours, theirs)]
    rows = f"{sizes[0]} and {sizes[1]} samples in a pass, " if all(sizes) else ""
    return f"{rows}on {counts[0][2]} in A and on {counts[1][2]} in B"


def _explain_draws(divided: str, seed: int | None, ours: Update, theirs: Update) -> str:
    """Say that dropout leaves out other elements because an update is divided otherwise, which is no mistake."""
    begun = "" if seed is None else f" although the first rank of both begins with the seed {seed}"
    words = (
        f"the model has dropout, which draws for {divided}: its random numbers differ{begun}, which follows from how an update is divided "
        "and is no mistake, and the loss differs with them; compare with dropout 0 to see whether anything else does"
    )
    for side, update in (("B", theirs), ("A", ours)):
        states = [state for state in update.rng if state]
        if len(states) > 1 and len(set(states)) == 1:
            words += (
                f". All ranks of {side} draw the same random numbers, though (one seed for all): add the rank to the seed after the model "
                "is built"
            )
    return words


def find_skipped(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain an update that one side alone has skipped."""
    side, other = ("B", "A") if theirs.skipped else ("A", "B")
    return [
        f"{side} has skipped this update, {other} has made it: the gradient scaler of {side} has found a gradient that is not finite; "
        "its scale is too large at first (init_scale) or the format too narrow. Every skipped update is missing in the training, "
        "while schedules and counters may go on"
    ]
