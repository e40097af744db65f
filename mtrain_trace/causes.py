"""Name the likely cause of the first thing in which two trainings part, with the remedy.

Up to the parting both trainings had the same start, samples, losses ... as far as the order of cause says, so what parts
can be explained by one thing. Sketches are linear: a gradient that is twice as large leaves no remainder when the other
one is doubled, and this is how a wrong factor is told from a wrong gradient.
"""

from __future__ import annotations

import math
from typing import Callable

import numpy as np

from mtrain_trace import comparing
from mtrain_trace.comparing import Comparison, Parting, settings_by_array, settings_differences, some
from mtrain_trace.reading import Trace, Update

EXPLAINED = 0.02
"""Largest remainder that a factor may leave, relative to the length of what it explains."""
NARROW_EFFECT = 0.5
"""Relative differences up to this may come from bfloat16 on one side alone; the steps of Adam grow those of gradients."""
NORMS = ("norm", "bn", "ln", "bias")
"""Parts of the names of arrays that recipes often exempt from weight decay."""

_ORDER = (
    "{} goes through the data in the same order in every epoch, {} in a new one: one does not shuffle, or sampler.set_epoch(epoch) "
    "is not called"
)


def explain(comparison: Comparison) -> list[str]:
    """Return sentences about training B, the likeliest cause first; empty where the trainings do not part."""
    parting = comparison.parting
    if parting is None:
        return []
    rule = _RULES[parting.what]
    if parting.place is None:
        return rule(comparison, parting, Update(0), Update(0))
    ours, theirs = comparison.a.updates[parting.place], comparison.b.updates[parting.place]
    sentences = _outside(comparison, parting.place) or rule(comparison, parting, ours, theirs)
    sentences = _precision(comparison, parting, sentences)
    if parting.what != comparing.SETTINGS:
        besides = settings_differences(ours, theirs)
        sentences += (
            [f"besides, the settings of the optimizer differ in this update (A and B): {'; '.join(besides[:4])}"]
            if besides
            else []
        )
    return sentences


def _precision(comparison: Comparison, parting: Parting, sentences: list[str]) -> list[str]:
    """Say first that the sides compute in other formats where that explains the size of a difference."""
    mine, other = comparing.precision_of(comparison.a), comparing.precision_of(comparison.b)
    numbers = (comparing.LOSS, comparing.GRADIENT, comparing.WEIGHTS, comparing.MOMENTS, comparing.BUFFERS)
    if mine == other or parting.what not in numbers:
        return sentences
    words = f"A computes in {mine}, B in {other}: the weights, activations and gradients of one side have fewer digits"
    return [words, *sentences] if parting.size < NARROW_EFFECT else [*sentences, words]


def _outside(comparison: Comparison, place: int) -> list[str]:
    """Say where weights were written by something else than the optimizer on one side only."""
    a, b = comparison.a.updates[place], comparison.b.updates[place]
    if a.changed_outside == b.changed_outside:
        return []
    side = "B" if b.changed_outside else "A"
    return [
        f"between the updates before, something else than the optimizer has written to the weights of {side}: an average "
        "that was swapped in and stayed, weights loaded again, a second optimizer of the same weights"
    ]


def _start(comparison: Comparison, parting: Parting, _: Update, __: Update) -> list[str]:
    a, b = comparison.a, comparison.b
    missing, further = sorted(set(a.start) - set(b.start)), sorted(set(b.start) - set(a.start))
    if missing or further:
        parts = [f"B does not train {some(missing)}"] if missing else []
        parts += [f"B trains {some(further)} besides"] if further else []
        return [
            "the optimizers hold other arrays: "
            + "; ".join(parts)
            + ": frozen or forgotten parts, tied weights, another model"
        ]
    if len(parting.arrays) == len(a.start):
        return [
            "all weights start otherwise: another seed, random numbers drawn before the model is built, other weights loaded"
        ]
    return [
        f"{len(parting.arrays)} of {len(a.start)} arrays start otherwise ({some(parting.arrays)}): weights that were loaded on "
        "one side only, or a part that is initialised on its own"
    ]


def _samples(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    a, b = comparison.a, comparison.b
    count_a, count_b = sum(ours.samples.values()), sum(theirs.samples.values())
    for side, update in (("B", theirs), ("A", ours)):
        if len(update.rank_samples) > 1 and all(rank == update.rank_samples[0] for rank in update.rank_samples):
            return [
                f"all ranks of {side} read the same samples: the data is not divided among ranks (no DistributedSampler, or "
                "one that was given no rank)"
            ]
    if count_a != count_b:
        return _sizes(comparison, ours, theirs, count_a, count_b)
    everything_a, everything_b = _all_samples(a), _all_samples(b)
    common = len(everything_a & everything_b) / max(len(set(theirs.samples)), 1)
    shared = len(set(theirs.samples) & everything_a) / max(len(set(theirs.samples)), 1)
    if _repeats_order(b) and not _repeats_order(a):
        return [_ORDER.format("B", "A")]
    if _repeats_order(a) and not _repeats_order(b):
        return [_ORDER.format("A", "B")]
    if shared > 0.5:
        shift = _shift(a, b, ours.number)
        if shift:
            return [
                f"B is {abs(shift)} update(s) {'ahead' if shift > 0 else 'behind'} in the same order of samples: batches were "
                "skipped or repeated, at a resume, at the end of an epoch (drop_last) or by one that was drawn to look at"
            ]
        return [
            "B sees the same samples in another order: another seed of the shuffle, or another division among ranks"
        ]
    if common == 0 and parting.update == 1:
        return [
            "no sample of B occurs in A: the data differ, or are prepared otherwise (normalisation, augmentation, dtype)"
        ]
    return [
        "some samples differ: augmentation draws from another state of the random numbers, or samples are prepared otherwise"
    ]


def _sizes(comparison: Comparison, ours: Update, theirs: Update, count_a: int, count_b: int) -> list[str]:
    a, b = comparison.a, comparison.b
    words = f"an update of A has {count_a} samples, of B {count_b}"
    for side, trace, further in (("B", b, theirs.samples - ours.samples), ("A", a, ours.samples - theirs.samples)):
        before = {digest for update in trace.updates[: theirs.number - 1] for digest in update.samples}
        whole = trace.samples_per_update // max(trace.updates[0].micro_batches, 1)
        # The last update may have fewer micro batches than the others; those that it has are full.
        if further and set(further) <= before and max(count_a, count_b) % max(whole, 1) == 0:
            return [
                f"{words}: {side} fills the last, incomplete batch up with samples that it had before (even_batches of Accelerate, a "
                "DistributedSampler without drop_last), which count twice in an epoch"
            ]
    if (theirs.number > 1 and count_b != b.samples_per_update) or count_a != a.samples_per_update:
        return [f"{words}: the last, incomplete batch is kept on one side only (drop_last)"]
    factor = count_b / count_a
    if math.isclose(factor, b.ranks / a.ranks):
        return [
            f"{words}: the batch size is per rank, and B has {b.ranks} rank(s) where A has {a.ranks}; divide it, or scale the "
            f"learning rate on purpose{_is_scaled(ours, theirs, factor)}"
        ]
    if math.isclose(factor, theirs.micro_batches / ours.micro_batches):
        return [
            f"{words}: B accumulates {theirs.micro_batches} micro batches, A {ours.micro_batches}, of the same size"
        ]
    return [f"{words}: the batch sizes differ"]


def _is_scaled(ours: Update, theirs: Update, factor: float) -> str:
    """Say whether the learning rate has grown with the batch; empty where it is not known."""
    mine, other = (update.rates[0].get("lr") if update.rates else None for update in (ours, theirs))
    if not isinstance(mine, (int, float)) or not isinstance(other, (int, float)) or not mine:
        return ""
    if math.isclose(other / mine, factor, rel_tol=1e-5):
        return f": it is {other:g} in place of {mine:g}, scaled as the batch is"
    if math.isclose(other, mine, rel_tol=1e-5):
        return f": it is {mine:g} in both, not scaled"
    return ""


def _targets(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    if ours.targets == theirs.targets:
        return ["the same samples have other labels: labels are shuffled or shifted against their samples"]
    for rank, (mine, other) in enumerate(zip(ours.rank_targets, theirs.rank_targets)):
        if len(theirs.rank_targets) > 1 and len(ours.rank_targets) == len(theirs.rank_targets) and mine != other:
            return [f"the samples are the same, but rank {rank} of B has other labels"]
    return ["the samples are the same, but their labels are not: another mapping of classes, padding or shift"]


def _loss(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    _a, _b = comparison.a, comparison.b
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
            "start weights, samples and labels are the same, the loss is not: the loss is computed otherwise (reduction, "
            "weights, label smoothing, padding that is counted), or the model draws random numbers (dropout) in another order"
        )
    elif not sentences:
        sentences.append(
            "the loss parts although the weights agreed before: dropout or noise draws other random numbers from here on, or "
            "buffers (BatchNorm) of the two have parted in a forward pass that is not recorded"
        )
    return sentences


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


def _skipped(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    side, other = ("B", "A") if theirs.skipped else ("A", "B")
    return [
        f"{side} has skipped this update, {other} has made it: the gradient scaler of {side} has found a gradient that is not finite; "
        "its scale is too large at first (init_scale) or the format too narrow. Every skipped update is missing in the training, "
        "while schedules and counters may go on"
    ]


def _gradient(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
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
    factor = _factor(_unclipped(ours), _unclipped(theirs))
    whole = None if factor is None else _whole_factor(factor)
    if whole is not None:
        return [_factor_words(whole, comparison, theirs, ours, what="gradient")]
    clipped = _clipped(theirs, ours)
    if clipped:
        return [clipped]
    if factor is not None and abs(factor - 1) > EXPLAINED:
        return [f"the gradient of B is {factor:.4g} times that of A, in the same direction"]
    return [_partial(comparison, parting, ours, theirs)]


def _unclipped(update: Update) -> np.ndarray | None:
    """Return the sketch of the gradient before it was clipped; None where it was not recorded."""
    row, clip = update.parts.get("gradients"), update.clips[0]
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
    factors = [_factor(gradient, other - mine) for gradient in (np.asarray(used.sketch), _unclipped(before))]
    return any(factor is not None and abs(factor - 1) < 0.05 for factor in factors)


def _clipped(theirs: Update, ours: Update) -> str | None:
    """Say what differs in clipping; None where nothing does."""
    mine, other = ours.clips[0], theirs.clips[0]
    if mine == other or not any(clip and clip["before"] > clip["limit"] for clip in (mine, other)):
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
    if before is not None and used_a is not None and comparing.relative(mine["before"], other["before"]) > EXPLAINED:
        return (
            f"the norms before clipping are {mine['before']:.4g} and {other['before']:.4g}: the gradient is clipped before the "
            "exchange, or other arrays are counted"
        )
    return None


def relative_clip(clip: dict[str, float], update: Update) -> float | None:
    """Return the norm that was used relative to the norm before clipping; None where either is not known."""
    return update.norm / clip["before"] if update.norm is not None and clip["before"] else None


def _partial(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> str:
    total = len(ours.arrays.get("gradients", {}))
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
        f"the loss is the same, the gradient is not, in no constant factor: {_lost(ours, theirs)}gradients of before were kept "
        "(zero_grad), or a part of the backward pass differs"
    )


def _lost(ours: Update, theirs: Update) -> str:
    """Say first that gradients of micro batches may be lost, where one side alone has several."""
    if (ours.micro_batches > 1) == (theirs.micro_batches > 1):
        return ""
    side, update = ("B", theirs) if theirs.micro_batches > 1 else ("A", ours)
    return f"{side} does not use the gradients of all its {update.micro_batches} micro batches (only the last one counts), "


def _settings(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    differences = settings_differences(ours, theirs)
    for side, update in (("B", theirs), ("A", ours)):
        for rank, rates in enumerate(update.rank_rates):
            if rates != update.rank_rates[0]:
                first = Update(0, rates=update.rank_rates[0], groups=update.groups)
                other = Update(0, rates=rates, groups=update.groups)
                return [
                    f"rank {rank} of {side} has other settings than rank 0: {'; '.join(settings_differences(first, other)[:3])}: a "
                    "schedule that sees the metric of one rank only, or is stepped on some"
                ]
    sentences = [f"the settings of the optimizer differ (A and B): {'; '.join(differences[:4])}"]
    moved = _regrouped(comparison)
    if moved:
        sentences.append(moved)
    if any("lr " in words for words in differences) and all("lr " in words for words in differences):
        factor = theirs.rates[0].get("lr", math.nan) / ours.rates[0]["lr"] if ours.rates[0].get("lr") else math.nan
        ranks = comparison.b.ranks / comparison.a.ranks
        if ranks != 1 and math.isclose(factor, ranks, rel_tol=1e-6):
            sentences.append(
                f"the learning rate of B is {factor:g} times that of A, as its ranks are: it is scaled with the ranks"
            )
        elif parting.update > 1:
            sentences.append(
                "the learning rates agreed before: the schedules differ in length, warm-up or unit (epochs or updates), or one "
                "was not resumed or not stepped"
            )
    return sentences


def _regrouped(comparison: Comparison) -> str:
    ours, theirs = settings_by_array(comparison.a.updates[0]), settings_by_array(comparison.b.updates[0])
    moved = [n for n in ours if n in theirs and ours[n].get("weight_decay") != theirs[n].get("weight_decay")]
    if moved and all(any(part in name for part in NORMS) for name in moved):
        return f"weight decay of biases and norms differs: {some(moved)}"
    return ""


def _weights(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    if comparison.a.described["rule"] != comparison.b.described["rule"]:
        return [f"the rules differ: A steps by {comparison.a.described['rule']}, B by {comparison.b.described['rule']}"]
    if ours.steps != theirs.steps:
        return [
            f"the optimizer of A has counted {ours.steps or 0} steps before this one, that of B {theirs.steps or 0}: its state was "
            "not saved, not loaded, or belongs to other parameters"
        ]
    regrouped = _regrouped(comparison)
    if regrouped:
        return [regrouped]
    for side, update in (("B", theirs), ("A", ours)):
        if update.ranks_agree.get("weights") is False:
            return [f"the ranks of {side} do not hold the same weights after the update"]
    return [
        "gradient and settings are the same, the weights after the step are not: moments of before differ, or the rule is "
        f"another one (momentum inside or outside, epsilon, decay); first in {some(parting.arrays)}"
    ]


def _moments(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    if ours.steps != theirs.steps:
        return _weights(comparison, parting, ours, theirs)
    return [
        f"the moments of the optimizer differ, first in {some(parting.arrays)}: its state was not resumed, or its rule differs"
    ]


def _norm_momentum(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> str:
    """Say how the momentum of BatchNorm differs, which the first update shows: running means begin with zeros."""
    mine, other = (update.arrays.get("buffers", {}) for update in (ours, theirs))
    means = [name for name in mine if name.endswith("running_mean") and name in other]
    if parting.place != 0 or not means:
        return ""
    sketches = [np.concatenate([side[name].sketch for name in means]) for side in (mine, other)]
    factor = _factor(*sketches)
    if factor is None or abs(factor - 1) <= EXPLAINED:
        return ""
    words = f"after the first update the running means of B are {factor:.4g} times those of A ({some(means)}): "
    words += "another momentum of BatchNorm"
    if comparing.framework_of(comparison.a) != comparing.framework_of(comparison.b):
        words += "; torch's momentum is the share of the new statistics (0.1 unless given), Paddle's that of the old ones (0.9)"
    return words


def _buffers(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    momentum = _norm_momentum(comparison, parting, ours, theirs)
    if momentum:
        return [momentum]
    factor = comparison.b.ranks / comparison.a.ranks
    if factor != 1:
        return [
            f"buffers differ ({some(parting.arrays)}): statistics of BatchNorm see the samples of one rank; use SyncBatchNorm, or "
            "compare trainings with as many ranks"
        ]
    if ours.micro_batches != theirs.micro_batches:
        return [
            f"buffers differ ({some(parting.arrays)}): statistics of BatchNorm see one micro batch, and these have other sizes"
        ]
    return [
        f"buffers differ ({some(parting.arrays)}): another momentum of BatchNorm, or forward passes that only one side makes"
    ]


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
    if what == "loss":
        return f"{front}: another reduction (sum or mean), or a weight of the loss"
    return f"{front}: gradients of before were kept (zero_grad is missing), or the loss is scaled and not unscaled"


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


def _factor(x: np.ndarray | None, y: np.ndarray | None) -> float | None:
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


def _all_samples(trace: Trace) -> set[str]:
    return {digest for update in trace.updates for digest in update.samples}


def _repeats_order(trace: Trace) -> bool:
    """Return whether the samples of the first update come again in another one, followed by those of the second."""
    updates = trace.updates
    for place in range(1, len(updates) - 1):
        if updates[place].samples == updates[0].samples and updates[0].samples:
            return updates[place + 1].samples == updates[1].samples
    return False


def _shift(a: Trace, b: Trace, number: int) -> int:
    """Return by how many updates B is ahead of A in the same order; 0 where it is not."""
    theirs = b.updates[number - 1].samples
    for distance in range(1, 9):
        for shift in (distance, -distance):
            place = number - 1 + shift
            if 0 <= place < len(a.updates) and a.updates[place].samples == theirs:
                return shift
    return 0


_RULES: dict[str, Callable[[Comparison, Parting, Update, Update], list[str]]] = {
    comparing.START: _start,
    comparing.SAMPLES: _samples,
    comparing.TARGETS: _targets,
    comparing.LOSS: _loss,
    comparing.SKIPPED: _skipped,
    comparing.GRADIENT: _gradient,
    comparing.CLIP: _gradient,
    comparing.SETTINGS: _settings,
    comparing.WEIGHTS: _weights,
    comparing.MOMENTS: _moments,
    comparing.BUFFERS: _buffers,
}
