"""Name the likely cause of the first thing in which two trainings part, with the remedy.

Up to the parting both trainings had the same start, samples, losses ... as far as the order of cause says, so what parts
can be explained by one thing. Sketches are linear: a gradient that is twice as large leaves no remainder when the other
one is doubled, and this is how a wrong factor is told from a wrong gradient.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Callable

import numpy as np

from mtrain_trace import (
    comparing,
    data_causes,
    differences,
    factors,
    gradient_causes,
    loss_causes,
    settings_causes,
    steps,
)
from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.differences import (
    BUFFERS,
    CLIP,
    GRADIENT,
    LOSS,
    MEASURED,
    MOMENTS,
    SAMPLES,
    SETTINGS,
    SKIPPED,
    START,
    TARGETS,
    WEIGHTS,
    settings_differences,
    some,
)
from mtrain_trace.loss_causes import of_one_side
from mtrain_trace.reading import AVERAGE, Update
from mtrain_trace.rounding import FIRST, NARROW_FLOORS
from mtrain_trace.steps import UpdateStep

NARROW_EFFECT = 0.5
"""Relative differences up to this may come from bfloat16 on one side alone; the steps of Adam grow those of gradients."""


def explain(comparison: Comparison) -> list[str]:
    """Return sentences about training B, the likeliest cause first; empty where the trainings do not part."""
    return [] if comparison.parting is None else _causes(comparison, comparison.parting)


def explain_bits(comparison: Comparison) -> list[str]:
    """Return sentences about the first update in which the bits of two trainings differ, be it by rounding; B is ``it``."""
    place = comparison.first
    if place is None:
        return []
    b, drifted = comparison.b, []
    if b.first_drift is not None and comparison.a.first_drift is None:
        when = f"after update {b.first_drift}" if b.first_drift else "at the start"
        drifted = [f"its ranks do not hold the same weights {when}: gradients are not the same on all ranks"]
    ours, theirs = comparison.a.updates[place], comparison.b.updates[place]
    if others := of_one_side("losses", ours.loss_parts, theirs.loss_parts) or _other_moments(comparison, place):
        return [*drifted, others]
    first = comparison.what[0]
    if is_rounding(comparison, first, place):
        # No rule makes buffers of rounding, as adam makes whole steps of weights.
        besides = [what for what in (SETTINGS, BUFFERS) if what in comparison.what]
        first = next((what for what in besides if not is_rounding(comparison, what, place)), first)
    if is_rounding(comparison, first, place):
        return [*drifted, *_find_rounded(comparison, first, place)]
    size = float(comparison.gaps[first].curve[place]) if first in MEASURED else math.inf
    number, known = (0, None) if first == START else (ours.number, place)
    arrays = comparing.worst_arrays(ours, theirs, first) if first != START else comparing.unlike_starts(comparison)
    return [*drifted, *_causes(comparison, Parting(first, number, size, place=known, arrays=arrays))]


def in_words(sentences: Sequence[str], names: tuple[str, str]) -> list[str]:
    """Return sentences in which the trainings have names in place of A and B."""
    by_letter = dict(zip("AB", names))
    return [
        re.sub(r"(?<![\w./-])[AB](?![\w/-]|[.:]\w)", lambda found: by_letter[found.group()], text) for text in sentences
    ]


def is_rounding(comparison: Comparison, what: str, place: int) -> bool:
    """Return whether a difference has the size of rounding where everything before has the same bits."""
    return what in FIRST and bool(comparison.gaps[what].curve[place] <= FIRST[what])


def _find_rounded(comparison: Comparison, what: str, place: int) -> list[str]:
    """Say what is rounded otherwise where bits first differ."""
    size = float(comparison.gaps[what].curve[place])
    if what in (GRADIENT, CLIP):
        kind = "gradient" if "gradients" in comparison.a.updates[place].parts else "gradient norm"
        words = f"the loss is the same and the {kind} {size:.0e} apart: gradients are added up in another order"
    elif what == LOSS and not size:
        words = "a part of the loss is added up in another order; the total is the same"
    elif what == LOSS:
        words = f"the forward pass is rounded differently ({size:.0e}): other kernels, another order of additions"
    else:
        words = f"a difference of {size:.0e} is the size of rounding"
    if str(comparison.a.optimizer_facts["rule"]).lower() == "sgd":
        return [words]
    whole = "adam divides by the size of each gradient, so rounding of the small ones moves weights by whole steps"
    return [words, whole]


def _causes(comparison: Comparison, parting: Parting) -> list[str]:
    rule = _RULES[parting.what]
    if parting.place is None:
        return rule(comparison, parting, Update(0), Update(0))
    ours, theirs = comparison.a.updates[parting.place], comparison.b.updates[parting.place]
    sentences = (
        # Weights that somebody else has written, or numbers without end, explain whatever follows.
        _outside(comparison, parting.place)
        or _not_finite(parting, ours, theirs)
        or rule(comparison, parting, ours, theirs)
    )
    sentences = _precision(comparison, parting, _find_renewed(parting, ours, theirs, sentences))
    # Another rate changes no gradient of this update, yet the reader will meet it next.
    if parting.what != SETTINGS:
        besides = settings_differences(ours, theirs)
        sentences += (
            [f"besides, the settings of the optimizer differ in this update (A and B): {'; '.join(besides[:4])}"]
            if besides
            else []
        )
    return sentences


def _not_finite(parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Say that one side alone has left the range of numbers; nothing where both have, or none."""
    mine, other = (_size_of(parting.what, update) for update in (ours, theirs))
    if mine is None or other is None or math.isfinite(mine) == math.isfinite(other):
        return []
    (side, size), (rest, finite) = (("A", mine), ("B", other)) if math.isfinite(other) else (("B", other), ("A", mine))
    what = {LOSS: "loss", GRADIENT: "gradient norm"}.get(parting.what, f"norm of the {parting.what}")
    return [
        f"the {what} of {side} is {size:g}, that of {rest} {finite:.4g}: something overflows or is no number on one side (a division by "
        "zero or a logarithm of it, a sample, a format with too few digits, a rate that is too large)"
    ]


def _size_of(what: str, update: Update) -> float | None:
    """Return the loss, or the norm of what is compared, of an update; None where it is not recorded."""
    if what == LOSS:
        return update.loss
    part = {GRADIENT: "gradients", WEIGHTS: "weights", MOMENTS: "moments", BUFFERS: "buffers"}.get(what, "")
    return update.parts[part].norm if part in update.parts else None


def _precision(comparison: Comparison, parting: Parting, sentences: list[str]) -> list[str]:
    """Say first that the sides compute in other formats where that explains the size of a difference."""
    mine, other = comparing.precision_of(comparison.a), comparing.precision_of(comparison.b)
    if mine == other or parting.what not in (LOSS, GRADIENT, WEIGHTS, MOMENTS, BUFFERS):
        return sentences
    words = f"A computes in {mine}, B in {other}: the weights, activations and gradients of one side have fewer digits"
    formats = [comparing.narrow_formats(trace) for trace in (comparison.a, comparison.b)]
    if formats[0] != formats[1] and parting.size <= NARROW_FLOORS[parting.what]:
        return [words]
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


def _find_renewed(parting: Parting, ours: Update, theirs: Update, sentences: list[str]) -> list[str]:
    """Say in place of other causes that a new optimizer object goes on with the arrays of one side alone."""
    if ours.renewed == theirs.renewed or parting.what not in (SETTINGS, MOMENTS, WEIGHTS):
        return sentences
    words = f"{'B' if theirs.renewed else 'A'} goes on with another optimizer of the same arrays from this update on (made anew)"
    lost = f"{words}: its state, such as moments and the count of steps, was not taken over"
    return [f"{words}; {sentences[0]}" if parting.what == SETTINGS else lost]


def _other_moments(comparison: Comparison, place: int) -> str:
    """Name moments that one side alone has, where both are measured alike at every update."""
    a, b = comparison.a, comparison.b
    if not a.measured or not differences.comparable(a, b, MOMENTS):
        return ""
    return of_one_side("moments", a.rows(MOMENTS, place), b.rows(MOMENTS, place))


def _weights(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    if _other_rules(comparison):
        return [
            f"the rules differ: A steps by {comparison.a.optimizer_facts['rule']}, B by {comparison.b.optimizer_facts['rule']}"
        ]
    if _other_steps(comparison, ours, theirs):
        return [
            f"the optimizer of A has counted {ours.steps or 0} steps before this one, that of B {theirs.steps or 0}: its state was "
            "not saved, not loaded, or belongs to other parameters"
        ]
    if regrouped := settings_causes.find_regrouped(comparison):
        return [regrouped]
    for side, update in (("B", theirs), ("A", ours)):
        if update.ranks_agree.get("weights") is False:
            return [f"the ranks of {side} do not hold the same weights after the update"]
    if told := steps.weights(_step(comparison, parting)):
        return [told]
    return [
        "gradient and settings are the same, the weights after the step are not: moments of before differ, or the rule is "
        f"another one (momentum inside or outside, epsilon, decay); first in {some(parting.arrays)}"
    ]


def _other_rules(comparison: Comparison) -> bool:
    """Return whether the sides step by different rules, whose names torch and mtrain spell differently."""
    return str(comparison.a.optimizer_facts["rule"]).lower() != str(comparison.b.optimizer_facts["rule"]).lower()


def _other_steps(comparison: Comparison, ours: Update, theirs: Update) -> bool:
    """Return whether the optimizers have counted other numbers of steps; a job of mtrain tells none."""
    return comparison.a.measured == comparison.b.measured and ours.steps != theirs.steps


def _moments(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    if _other_steps(comparison, ours, theirs) or _other_rules(comparison):
        return _weights(comparison, parting, ours, theirs)
    orders = [[name for group in update.groups for name in group] for update in (ours, theirs)]
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        return [
            f"the optimizers hold the same arrays in another order (A {some(orders[0])}; B {some(orders[1])}): a state that is loaded goes "
            "by position, so that of some arrays has gone to others"
        ]
    if told := _other_moments(comparison, parting.place or 0) or steps.moments(_step(comparison, parting)):
        return [told]
    return [
        f"the moments of the optimizer differ, first in {some(parting.arrays)}: its state was not resumed, or its rule differs"
    ]


def _step(comparison: Comparison, parting: Parting) -> UpdateStep:
    return UpdateStep(comparison.a, comparison.b, parting.place or 0)


def _average(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    told = steps.average(_step(comparison, parting))
    return [told or "weights are the same, their average is not: look at the share that it keeps of itself"]


def _norm_momentum(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> str:
    """Say how the momentum of BatchNorm differs, which the first update shows: running means begin with zeros."""
    mine, other = (update.arrays.get("buffers", {}) for update in (ours, theirs))
    means = [name for name in mine if name.endswith("running_mean") and name in other]
    if parting.place != 0 or not means:
        return ""
    sketches = [np.concatenate([side[name].sketch for name in means]) for side in (mine, other)]
    factor = factors.factor_of(*sketches)
    if factor is None or abs(factor - 1) <= factors.EXPLAINED:
        return ""
    words = f"after the first update the running means of B are {factor:.4g} times those of A ({some(means)}): "
    words += "another momentum of BatchNorm"
    if {comparison.a.framework, comparison.b.framework} == {"torch", "paddle"}:
        words += "; torch's momentum is the share of the new statistics (0.1 unless given), Paddle's that of the old ones (0.9)"
    return words


def _buffers(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    if momentum := _norm_momentum(comparison, parting, ours, theirs):
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
        f"buffers differ ({some(parting.arrays)}): the running statistics of BatchNorm are kept with another momentum or variance, "
        "or are not rank 0's, or forward passes are made by one side only"
    ]


_RULES: dict[str, Callable[[Comparison, Parting, Update, Update], list[str]]] = {
    START: data_causes.start,
    SAMPLES: data_causes.samples,
    TARGETS: data_causes.targets,
    LOSS: loss_causes.loss,
    SKIPPED: loss_causes.find_skipped,
    GRADIENT: gradient_causes.gradient,
    CLIP: gradient_causes.gradient,
    SETTINGS: settings_causes.settings,
    WEIGHTS: _weights,
    MOMENTS: _moments,
    BUFFERS: _buffers,
    AVERAGE: _average,
}
