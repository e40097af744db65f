"""Recognise known reasons why a job departs from another one, from the first update in which they differ.

Until then both have the same bits, so the step of b may be written as the step of a with one thing changed. Sketches
are linear and show which thing: the change that explains them leaves almost no remainder.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mtrain.core.interfaces import Array, Recipe
from mtrain.core.recipe import ema_shares
from mtrain.studies.compare.differences import LOSS, NORM, SAMPLES, START, Difference, ordinal
from mtrain.studies.compare.several import (
    EXPLAINED,
    fit,
    models_apart,
    named,
    other_rates,
    other_trained,
    unlike_models,
)
from mtrain.studies.compare.traces import BUFFERS, EMA, MOMENTS, WEIGHTS, Trace

ROUNDING = {LOSS: 1e-5, NORM: 1e-3, MOMENTS: 1e-3, WEIGHTS: 1e-3, BUFFERS: 1e-4, EMA: 1e-3}
"""Relative differences up to these count as rounding when they first appear."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The settings of job b that the explanations need."""

    recipe: Recipe
    """Recipe of job b."""
    ranks: int
    """Number of ranks of job b."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """The first update in which the jobs differ."""

    a: Trace
    b: Trace
    facts: Facts
    update: int
    gap: Difference

    @property
    def momentum(self) -> float:
        """Return the momentum of the schedule or else the recipe; if groups differ, the last group's."""
        scheduled = self.a.momenta[self.update]
        options = self.facts.recipe.groups[-1][1]
        return scheduled if scheduled is not None else options.get("momentum", options.get("beta1", 0.0))

    @property
    def share(self) -> float:
        """Return the share of a gradient that is added to the running gradient."""
        return 1.0 if self.facts.recipe.rule == "sgd" else 1 - self.momentum

    @property
    def is_first(self) -> bool:
        """Return whether no update came before, so that all running gradients are 0."""
        return not any(self.before(part).any() for part in self.first_moments())

    def before(self, part: str) -> Array:
        """Return the sketch of a part before the update; it is the same in both jobs."""
        sketch: Array = self.a.sketches[part][self.update]
        return sketch

    def after(self, trace: Trace, part: str) -> Array:
        """Return the sketch of a part after the update."""
        sketch: Array = trace.sketches[part][self.update + 1]
        return sketch

    def first_moments(self) -> list[str]:
        """Return the parts that hold the running gradient; none for rules whose moments are of another kind."""
        if self.facts.recipe.rule in ("lion", "rmsprop", "adadelta"):
            return []
        return [
            part
            for part in self.a.named(MOMENTS)
            if part.split("/")[0] in ("momentum", "mean") and part in self.b.digests
        ]

    def added(self, trace: Trace, part: str) -> Array:
        """Return the sketch of what was added to the running gradient."""
        return self.after(trace, part) - self.momentum * self.before(part)

    def gradient(self, trace: Trace, part: str) -> Array:
        """Return the sketch of the gradient added to the running gradient, without weight decay (for adam times ``1 -
        beta1``)."""
        recipe, group = self.facts.recipe, part.split("/")[1]
        decay = recipe.groups[int(group)][1].get("weight_decay", 0.0) if recipe.rule in ("sgd", "adam") else 0.0
        return self.added(trace, part) - self.share * decay * self.before(f"weights/{group}")

    def plain(self, weights: list[str]) -> Array:
        """Return the sketch of the step of sgd with momentum."""
        groups = [name.split("/")[1] for name in weights]
        return np.concatenate(
            [-self._learning_rate(group) * self.after(self.a, f"momentum/{group}") for group in groups]
        )

    def ahead(self, weights: list[str]) -> Array:
        """Return the sketch of the step of sgd with nesterov's momentum."""
        steps = []
        for group in (name.split("/")[1] for name in weights):
            momentum = self.after(self.a, f"momentum/{group}")
            added = momentum - self.momentum * self.before(f"momentum/{group}")
            steps.append(-self._learning_rate(group) * (added + self.momentum * momentum))
        return np.concatenate(steps)

    def _learning_rate(self, group: str) -> float:
        return float(self.a.rates[self.update][int(group)])


def causes(a: Trace, b: Trace, gap: Difference, facts: Facts) -> list[str]:
    """Return sentences about job b, the likeliest cause first; empty for the same bits."""
    if gap.first is None:
        return []
    step = _Step(a=a, b=b, facts=facts, update=gap.first, gap=gap)
    sentences = []
    if b.drifted is not None and a.drifted is None:
        sentences.append(
            f"its ranks do not hold the same weights after {ordinal(b.drifted - 1)}: gradients are not the same on all "
            "ranks"
        )
    if told := other_trained(a, b, gap.first) or other_rates(a, b, gap.first, gap.what[0]):
        return [*sentences, told]
    others = _of_one_only("losses", a.losses, b.losses) or _of_one_only("moments", a.named(MOMENTS), b.named(MOMENTS))
    if others:
        return [*sentences, others]
    first = gap.what[0]
    if _is_rounding(step, first) and BUFFERS in gap.what and not _is_rounding(step, BUFFERS):
        first = BUFFERS  # No rule makes buffers of rounding, as adam makes whole steps of weights.
    if _is_rounding(step, first):
        sentences.append(_rounding_sentence(step, first))
        if facts.recipe.rule != "sgd":
            sentences.append(
                "adam divides by the size of each gradient, so rounding of the small ones moves weights by whole steps"
            )
        return sentences
    models = models_apart(a, b, gap.first, first)
    if told := unlike_models(a, b, gap.first, first, models):
        return [*sentences, told]
    found = _BY_QUANTITY[first](step)
    return [*sentences, *([f"{named(models)}: {found[0]}", *found[1:]] if models else found)]


def _of_one_only(what: str, ours: Iterable[str], theirs: Iterable[str]) -> str:
    """Name what only one of two jobs has; empty where both have the same."""
    missing, further = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(further)} besides"] if further else []
    return f"its {what} are others: it {' and '.join(parts)}; a part of the recipe is not applied" if parts else ""


def _is_rounding(step: _Step, first: str) -> bool:
    limit = ROUNDING.get(first)
    return limit is not None and bool(step.gap.gaps[first].curve[step.update] <= limit)


def _rounding_sentence(step: _Step, first: str) -> str:
    size = f"{step.gap.gaps[first].curve[step.update]:.0e}"
    if first == NORM:
        return f"the loss is the same and the gradient norm {size} apart: gradients are added up in another order"
    if first == LOSS and not step.gap.gaps[first].curve[step.update]:
        return "a part of the loss is added up in another order; the total is the same"
    if first == LOSS:
        return f"the forward pass is rounded differently ({size}): other kernels, another order of additions"
    return f"a difference of {size} is the size of rounding"


# -------------------------------------------------------------------------------- by the quantity that differs first
def _start(step: _Step) -> list[str]:
    return ["it starts from other weights; all later differences follow from that"]


def _samples(step: _Step) -> list[str]:
    return ["its ranks received other samples, in another order, or augmented differently"]


def _loss(step: _Step) -> list[str]:
    u = step.update
    factor = step.b.losses["total"][u] / step.a.losses["total"][u]
    named = _named_factor(factor, step.facts)
    if named:
        return [
            f"its loss is {factor:.4g} times as large, {named}: the loss is summed where the mean is meant, or the "
            "other way round"
        ]
    same = "weights and samples are the same" if u else "start weights and samples are the same"
    return [
        f"{same} and the loss is not ({step.gap.gaps[LOSS].curve[u]:.1e}): the forward pass itself differs; look at "
        "precision, at "
        "BatchNorm over ranks (train.sync_batchnorm), at the micro batch, at dropout"
    ]


def _norm(step: _Step) -> list[str]:
    u = step.update
    factor = step.b.norms[u] / step.a.norms[u] if step.a.norms[u] else float("nan")
    named = _named_factor(factor, step.facts)
    if named:
        kind = "summed, not averaged" if factor > 1 else "divided once too often"
        return [f"its gradient norm is {factor:.4g} times as large at the same loss, {named}: gradients are {kind}"]
    return [
        f"the loss is the same and the gradient norm is not ({step.b.norms[u]:.4g} instead of {step.a.norms[u]:.4g}): "
        "look at the "
        "exchange between ranks, at micro batches that are left out, at the scaling of the loss"
    ]


def _moments(step: _Step) -> list[str]:
    parts = step.first_moments()
    if not parts:
        return ["loss and gradient norm are the same, the moments are not"]
    change = np.concatenate([step.after(step.b, part) - step.after(step.a, part) for part in parts])
    if not change.any():
        return ["the running squares of the gradient are not the same: look at beta2"]
    applied = np.concatenate([step.gradient(step.a, part) for part in parts])
    momenta = np.concatenate([step.before(part) for part in parts])
    weights = np.concatenate([step.before(f"weights/{part.split('/')[1]}") for part in parts])
    if step.facts.recipe.rule != "sgd":  # A mean: what is not kept of it is added.
        momenta = momenta - np.concatenate([step.added(step.a, part) for part in parts]) / step.share
    explanations = [
        (*fit(change, applied), _scaled),
        (*fit(change, momenta), _other_momentum),
        (*fit(change, step.share * weights), _other_decay),
    ]
    remainder, times, sentence = min(explanations, key=lambda attempt: round(attempt[0], 3))  # the first of equals
    if remainder <= EXPLAINED:
        return [sentence(step, times)]
    groups = [part.split("/")[1] for part in parts if (step.after(step.b, part) != step.after(step.a, part)).any()]
    return [
        f"loss and gradient norm are the same, the moments are not (parameter groups {', '.join(groups)}): "
        f"{_decay_of(step, parts)}"
    ]


def _decay_of(step: _Step, parts: list[str]) -> str:
    """Report the groups whose weight decay differs; each group is checked on its own."""
    findings = []
    for part in parts:
        change = step.after(step.b, part) - step.after(step.a, part)
        group = part.split("/")[1]
        remainder, times = fit(change, step.share * step.before(f"weights/{group}"))
        if change.any() and remainder <= EXPLAINED:
            findings.append(f"group {group} has a weight decay that differs by {times:+.2g}")
    return "; ".join(findings) or "look at clipping, momentum and weight decay"


def _scaled(step: _Step, change: float) -> str:
    """Explain a gradient that b applied ``1 + change`` times as long as a did."""
    norm, limit = float(step.a.norms[step.update]), step.facts.recipe.clip_norm
    factor = 1 + change
    clipped = min(1.0, limit / (norm + 1e-6)) * factor
    spec_text = f"the spec says {limit:g}" if np.isfinite(limit) else "the spec says no limit"
    prefix = "loss and gradient norm are the same, the gradient that is applied is not"
    if abs(clipped - 1) < EXPLAINED and norm > limit * (1 + EXPLAINED):
        return f"{prefix}: it does not clip, {spec_text} (the norm was {norm:.4g})"
    length, earlier = clipped * norm, step.a.norms[: step.update]
    if clipped < 1 and (earlier <= length * (1 + EXPLAINED)).all():
        return f"{prefix}: it clips at {_round(length)}, {spec_text} (the norm was {norm:.4g})"
    reason = _named_factor(factor, step.facts)
    momentum = 1 - factor * step.share
    if not reason and step.facts.recipe.rule != "sgd" and step.is_first and 0 <= momentum < 1:
        reason = f"as with a momentum of {momentum:.3g} instead of {step.momentum:.3g}"
    return f"{prefix}: it is {factor:.4g} times as large" + (f", {reason}" if reason else "")


def _other_momentum(step: _Step, change: float) -> str:
    return f"its momentum is {step.momentum + change:.4g}, {step.momentum:.4g} was asked for"


def _other_decay(step: _Step, change: float) -> str:
    return f"its weight decay differs from the spec's by {change:+.2g}"


def _weights(step: _Step) -> list[str]:
    names = [name for name in step.a.named(WEIGHTS) if name in step.b.digests]
    parts_a, parts_b = ([step.after(trace, name) - step.before(name) for name in names] for trace in (step.a, step.b))
    steps_a, steps_b = np.concatenate(parts_a), np.concatenate(parts_b)
    # An optimizer of a script's own has moments of its own, and mtrain does not know its rule.
    if step.facts.recipe.rule == "sgd" and step.first_moments():
        if _is(steps_b, step.plain(names)):
            return ["moments are the same, its step is the plain momentum: nesterov is off"]
        if _is(steps_b, step.ahead(names)):
            return ["moments are the same, its step looks ahead: nesterov is on"]
    remainder, change = fit(steps_b - steps_a, steps_a)
    if remainder <= EXPLAINED:
        return [
            f"moments are the same, its step is {1 + change:.4g} times as long{_reason_of_length(step, 1 + change)}"
        ]
    groups = [name.split("/")[1] for name in names if (step.after(step.b, name) != step.after(step.a, name)).any()]
    return [
        f"moments are the same, the step of the weights is not (parameter groups {', '.join(groups)}): look at "
        "learning rates, "
        "nesterov, and decoupled weight decay"
    ]


def _reason_of_length(step: _Step, factor: float) -> str:
    """Explain why a step may be ``factor`` times as long. In the first step nesterov's ``1 + momentum`` acts like the
    learning rate."""
    named = _named_factor(factor, step.facts)
    if named:
        return f", {named}: look at the learning rate"
    options = step.facts.recipe.groups[-1][1]
    momentum = factor * (1 + step.momentum) - 1
    if step.is_first and options.get("nesterov") and 0 <= momentum < 1:
        return f": as with a momentum of {momentum:.3g} instead of {step.momentum:.3g}, or another learning rate"
    return ": look at the learning rate"


def _buffers(step: _Step) -> list[str]:
    rounded = step.gap.what[0] != BUFFERS
    return [
        f"all trained weights are the same{' but for rounding' if rounded else ''}, the buffers are not: "
        "running statistics of BatchNorm are kept with another momentum or variance, or are not rank 0's"
    ]


def _average(step: _Step) -> list[str]:
    keep_share, new_share = ema_shares(step.facts.recipe, step.update + 1)
    before, weights = step.a.sketch(EMA)[step.update], step.a.sketch(WEIGHTS)[step.update + 1]
    weights = weights + step.a.sketch(BUFFERS)[step.update + 1]
    change = step.b.sketch(EMA)[step.update + 1] - step.a.sketch(EMA)[step.update + 1]
    remainder, times = fit(change, before - weights)
    if remainder <= EXPLAINED:
        return [
            f"weights are the same, their average is not: it keeps {keep_share + times:.3g} of itself per update, "
            f"{keep_share:.3g} was asked for"
        ]
    return [
        f"weights are the same, their average is not (asked for: keep {keep_share:.4g}, take {new_share:.4g}): look at "
        "train.ema"
    ]


_BY_QUANTITY: Mapping[str, Callable[[_Step], list[str]]] = {
    START: _start,
    SAMPLES: _samples,
    LOSS: _loss,
    NORM: _norm,
    MOMENTS: _moments,
    WEIGHTS: _weights,
    BUFFERS: _buffers,
    EMA: _average,
}


# ------------------------------------------------------------------------------------------------------------ metrics
def _is(one: Array, other: Array) -> bool:
    length = float(np.linalg.norm(other))
    return length > 0 and bool(np.linalg.norm(one - other) <= EXPLAINED * length)


def _named_factor(factor: float, facts: Facts) -> str:
    """Return a possible origin of a factor; empty if none is known."""
    ranks, accumulate = facts.ranks, facts.recipe.accumulate
    origins = {
        ranks * accumulate: f"ranks x micro batches per update ({ranks} x {accumulate})",
        accumulate: f"the micro batches per update ({accumulate})",
        ranks: f"the number of ranks ({ranks})",
    }
    if ranks == accumulate:
        origins[ranks] = f"the number of ranks and of micro batches per update ({ranks})"
    for value, words in origins.items():
        if value > 1 and abs(factor / value - 1) < 1e-2:
            return words
        if value > 1 and abs(factor * value - 1) < 1e-2:
            return f"one over {words}"
    return ""


def _round(value: float) -> str:
    """Format a rounded number if ``value`` is near one: 0.998 as 1."""
    rounded = float(f"{value:.1g}")
    return f"{rounded:.1f}" if abs(value / rounded - 1) < EXPLAINED else f"{value:.3g}"
