"""Explain the step of one training as that of another with one thing changed: a factor, a momentum, a decay.

Up to the first update in which two trainings part they hold the same state, so what an update has made of it shows what it
did. Sketches are linear and show which thing was changed: the change that explains the step leaves almost no remainder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtrain_trace import mixing
from mtrain_trace.differences import MOMENTS, WEIGHTS, settings_by_array
from mtrain_trace.reading import AVERAGE, ArrayRow, Trace, Update

EXPLAINED = 0.03
"""Largest remainder that an explanation may leave, as a share of the difference."""
RUNNING = ("momentum", "mean", "momentum_buffer", "exp_avg")
"""First words of the names of moments that are running gradients."""
WITHOUT_RUNNING = ("lion", "rmsprop", "adadelta")
"""Rules whose moments of such names are of another kind."""


@dataclass(frozen=True)
class UpdateStep:
    """One update of two trainings that had the same state before it."""

    a: Trace
    b: Trace
    place: int

    @property
    def ours(self) -> Update:
        """Return the update of A."""
        return self.a.updates[self.place]

    @property
    def rule(self) -> str:
        """Return the name of the optimizer's rule in small letters."""
        return str(self.a.optimizer_facts["rule"]).lower()

    @property
    def is_plain(self) -> bool:
        """Return whether a running gradient is a sum, as under sgd, and no mean."""
        return self.rule == "sgd"

    @property
    def momentum(self) -> float:
        """Return the share of itself that a running gradient keeps; if groups differ, that of the last group."""
        options = self.ours.rates[-1] if self.ours.rates else {}
        betas = options.get("betas") or [0.0]
        return float(options.get("momentum", options.get("beta1", betas[0])) or 0.0)

    @property
    def share(self) -> float:
        """Return the share of a gradient that is added to the running gradient."""
        return 1.0 if self.is_plain else 1 - self.momentum

    @property
    def running(self) -> list[str]:
        """Return the names of the running gradients that both sides have recorded; none for rules of another kind."""
        if self.rule in WITHOUT_RUNNING:
            return []
        mine, other = self.after(self.a, MOMENTS), self.after(self.b, MOMENTS)
        running = [name for name in mine if name.split("/")[0] in RUNNING and name in other]
        return [name for name in running if self._was(MOMENTS, name) and self._is_finite(MOMENTS, name)]

    @property
    def weights(self) -> list[str]:
        """Return the names of the weights that both sides have recorded before and after the update."""
        mine, other = self.after(self.a, WEIGHTS), self.after(self.b, WEIGHTS)
        return [name for name in mine if name in other and self._was(WEIGHTS, name) and self._is_finite(WEIGHTS, name)]

    @property
    def is_first(self) -> bool:
        """Return whether all running gradients were 0 before the update."""
        return not any(self.before(MOMENTS, name).any() for name in self.running)

    def after(self, trace: Trace, part: str) -> dict[str, ArrayRow]:
        """Return the arrays of a part after the update."""
        return trace.rows(part, self.place)

    def before(self, part: str, name: str) -> Any:
        """Return the sketch of an array before the update; it is the same on both sides."""
        row = self.a.rows(part, self.place - 1).get(name)
        return np.zeros(self._length) if row is None else np.asarray(row.sketch)

    def change(self, part: str, name: str) -> Any:
        """Return the sketch of what B has after the update and A has not."""
        mine, other = self.after(self.a, part)[name], self.after(self.b, part)[name]
        return np.asarray(other.sketch) - np.asarray(mine.sketch)

    def way_of(self, trace: Trace, name: str) -> Any:
        """Return the sketch of the step of a weight."""
        return np.asarray(self.after(trace, WEIGHTS)[name].sketch) - self.before(WEIGHTS, name)

    def gain_of(self, name: str) -> Any:
        """Return the sketch of what A has added to a running gradient."""
        return np.asarray(self.after(self.a, MOMENTS)[name].sketch) - self.momentum * self.before(MOMENTS, name)

    def gradient(self, name: str) -> Any:
        """Return the sketch of the gradient that A has added to a running gradient, without weight decay."""
        if not self.has_one_measure or self.rule not in ("sgd", "adam"):
            return self.gain_of(name)
        decay = self.options(weight_of(name)).get("weight_decay", 0.0)
        return self.gain_of(name) - self.share * decay * self.before(WEIGHTS, weight_of(name))

    def options(self, weight: str) -> dict[str, Any]:
        """Return the options of the parameter group of a weight."""
        return settings_by_array(self.ours).get(weight, {})

    @property
    def has_one_measure(self) -> bool:
        """Return whether moments were measured as their weights are, so that one can be fitted to the other."""
        return bool(self.a.measured.get(MOMENTS))

    @property
    def _length(self) -> int:
        rows = [*self.after(self.a, MOMENTS).values(), *self.after(self.a, WEIGHTS).values()]
        return len(rows[0].sketch) if rows else mixing.LENGTH

    def _is_finite(self, part: str, name: str) -> bool:
        """Return whether all numbers that explain an array are finite; what is not is left out before anything is computed."""
        own = [
            trace.rows(part, place).get(name) for trace in (self.a, self.b) for place in (self.place - 1, self.place)
        ]
        weight = [self.a.rows(WEIGHTS, self.place - 1).get(weight_of(name))] if part == MOMENTS else []
        return all(row is None or np.isfinite(row.sketch).all() for row in (*own, *weight))

    def _was(self, part: str, name: str) -> bool:
        """Return whether what an array was before the update is known; moments begin as zeros."""
        known = self.a.rows(part, self.place - 1)
        return name in known or (part == MOMENTS and self.place == 0 and not (self.a.before or self.ours.steps))


def weight_of(moment: str) -> str:
    """Return the name of the weight that a moment belongs to."""
    return moment.partition("/")[2]


def fit(change: Any, direction: Any) -> tuple[float, float]:
    """Return (share of ``change`` that remains, factor) of the best ``factor * direction``."""
    with np.errstate(over="ignore"):
        squared = float(np.sum(direction**2))
    # A direction without length, or numbers that are too large to square, explain nothing.
    if not squared or not change.any() or not math.isfinite(squared) or not np.isfinite(change).all():
        return 1.0, 0.0
    factor = float(change @ direction) / squared
    return float(np.linalg.norm(change - factor * direction) / np.linalg.norm(change)), factor


def moments(step: UpdateStep) -> str:
    """Explain running gradients that differ at the same gradient; empty where nothing explains them."""
    names = step.running
    if not names:
        return ""
    change = np.concatenate([step.change(MOMENTS, name) for name in names])
    if not change.any():
        return "the running squares of the gradient are not the same: look at beta2"
    kept = np.concatenate([step.before(MOMENTS, name) for name in names])
    if not step.is_plain:  # A mean: what is not kept of it is added.
        kept = kept - np.concatenate([step.gain_of(name) for name in names]) / step.share
    # Each attempt says how much of the difference one change leaves unexplained; the least wins.
    attempts = [(*fit(change, np.concatenate([step.gradient(name) for name in names])), _explain_length)]
    attempts.append((*fit(change, kept), _other_momentum))
    if step.has_one_measure:
        weights = np.concatenate([step.before(WEIGHTS, weight_of(name)) for name in names])
        attempts.append((*fit(change, step.share * weights), _other_decay))
    remainder, times, sentence = min(attempts, key=lambda attempt: round(attempt[0], 3))  # the first of equals
    if remainder <= EXPLAINED:
        return sentence(step, times)
    return _decays(step, names)


def _decays(step: UpdateStep, names: list[str]) -> str:
    """Name the weights whose decay differs, each on its own; empty where decay explains none of them."""
    if not step.has_one_measure:
        return ""
    found = []
    for name in names:
        change, weight = step.change(MOMENTS, name), weight_of(name)
        remainder, times = fit(change, step.share * step.before(WEIGHTS, weight))
        if change.any() and remainder <= EXPLAINED:
            found.append(f"{weight} has a weight decay that differs by {times:+.2g}")
    return f"loss and gradient are the same, the moments are not: {'; '.join(found)}" if found else ""


def _explain_length(step: UpdateStep, change: float) -> str:
    """Explain a gradient that B has applied ``1 + change`` times as long as A."""
    factor = 1 + change
    front = "loss and gradient norm are the same, the gradient that is applied is not"
    if clipped := _other_clip(step, factor):
        return f"{front}: it {clipped}"
    reason = name_factor(factor, step.b.ranks, step.b.updates[step.place].micro_batches)
    momentum = 1 - factor * step.share
    if not reason and not step.is_plain and step.is_first and 0 <= momentum < 1:
        reason = f"as with a momentum of {momentum:.3g} instead of {step.momentum:.3g}"
    return f"{front}: it is {factor:.4g} times as large" + (f", {reason}" if reason else "")


def _other_clip(step: UpdateStep, factor: float) -> str:
    """Say how a gradient that is applied ``factor`` times as long was clipped; empty where clipping explains nothing."""
    norm, asked = step.ours.norm_before, step.a.asked
    if norm is None or asked is None:
        return ""
    limit, clipped = asked.clip, min(1.0, asked.clip / (norm + 1e-6)) * factor
    spec = f"the spec says {limit:g}" if math.isfinite(limit) else "the spec says no limit"
    if abs(clipped - 1) < EXPLAINED and norm > limit * (1 + EXPLAINED):
        return f"does not clip, {spec} (the norm was {norm:.4g})"
    length, earlier = clipped * norm, [update.norm_before or 0.0 for update in step.a.updates[: step.place]]
    if clipped < 1 and all(before <= length * (1 + EXPLAINED) for before in earlier):
        return f"clips at {_round(length)}, {spec} (the norm was {norm:.4g})"
    return ""


def _other_momentum(step: UpdateStep, change: float) -> str:
    known = f"{step.momentum:.4g} was asked for" if step.a.asked else f"that of A {step.momentum:.4g}"
    return f"its momentum is {step.momentum + change:.4g}, {known}"


def _other_decay(step: UpdateStep, change: float) -> str:
    return f"its weight decay differs from {_source(step)} by {change:+.2g}"


def _source(step: UpdateStep) -> str:
    return "the spec's" if step.a.asked else "that of A"


def weights(step: UpdateStep) -> str:
    """Explain a step of the weights that differs at the same moments; empty where nothing explains it."""
    names = step.weights
    if not names:
        return ""
    ours, theirs = (np.concatenate([step.way_of(trace, name) for name in names]) for trace in (step.a, step.b))
    if step.has_one_measure and step.is_plain and step.running:
        if _is(theirs, np.concatenate([_plain(step, name) for name in names])):
            return "moments are the same, its step is the plain momentum: nesterov is off"
        if _is(theirs, np.concatenate([_ahead(step, name) for name in names])):
            return "moments are the same, its step looks ahead: nesterov is on"
    decay = [-float(step.options(name).get("lr", 0.0)) * step.before(WEIGHTS, name) for name in names]
    remainder, change = fit(theirs - ours, np.concatenate(decay))
    if remainder <= EXPLAINED:
        return f"moments are the same, its decoupled weight decay differs from {_source(step)} by {change:+.2g}"
    remainder, change = fit(theirs - ours, ours)
    if remainder > EXPLAINED:
        return ""
    return f"moments are the same, its step is {1 + change:.4g} times as long{_reason_of_length(step, 1 + change)}"


def _running_of(step: UpdateStep, weight: str) -> str:
    return next(name for name in step.running if weight_of(name) == weight)


def _plain(step: UpdateStep, weight: str) -> Any:
    """Return the sketch of the step of sgd with momentum."""
    momentum = np.asarray(step.after(step.a, MOMENTS)[_running_of(step, weight)].sketch)
    return -float(step.options(weight)["lr"]) * momentum


def _ahead(step: UpdateStep, weight: str) -> Any:
    """Return the sketch of the step of sgd with nesterov's momentum."""
    name = _running_of(step, weight)
    momentum = np.asarray(step.after(step.a, MOMENTS)[name].sketch)
    return -float(step.options(weight)["lr"]) * (step.gain_of(name) + step.momentum * momentum)


def _reason_of_length(step: UpdateStep, factor: float) -> str:
    """Explain a step that is ``factor`` times as long. In the first one nesterov's ``1 + momentum`` acts like the rate."""
    if known := name_factor(factor, step.b.ranks, step.b.updates[step.place].micro_batches):
        return f", {known}: look at the learning rate"
    momentum = factor * (1 + step.momentum) - 1
    if step.is_first and step.ours.rates[-1].get("nesterov") and 0 <= momentum < 1:
        return f": as with a momentum of {momentum:.3g} instead of {step.momentum:.3g}, or another learning rate"
    return ": look at the learning rate"


def average(step: UpdateStep) -> str:
    """Explain an average of the weights that differs at the same weights; empty where no share explains it."""
    if step.a.asked is None or not step.a.asked.keep:
        return ""
    keep, parts = step.a.asked.keep[step.place], (WEIGHTS, "buffers")
    mine, other = (np.asarray(trace.updates[step.place].parts[AVERAGE].sketch) for trace in (step.a, step.b))
    held = [step.a.updates[step.place].parts[part].sketch for part in parts if part in step.ours.parts]
    before = np.sum([row.sketch for row in step.a.rows(AVERAGE, step.place - 1).values()], axis=0)
    remainder, times = fit(other - mine, before - np.sum(held, axis=0))
    if remainder > EXPLAINED:
        return ""
    return f"weights are the same, their average is not: it keeps {keep + times:.3g} of itself per update, {keep:.3g} was asked for"


def name_factor(factor: float, ranks: int, passes: int) -> str:
    """Return a possible origin of a factor among the numbers of ranks and micro batches; empty if none is known."""
    origins = {
        ranks * passes: f"ranks x micro batches per update ({ranks} x {passes})",
        passes: f"the micro batches per update ({passes})",
        ranks: f"the number of ranks ({ranks})",
    }
    if ranks == passes:
        origins[ranks] = f"the number of ranks and of micro batches per update ({ranks})"
    for value, words in origins.items():
        if value > 1 and abs(factor / value - 1) < 1e-2:
            return words
        if value > 1 and abs(factor * value - 1) < 1e-2:
            return f"one over {words}"
    return ""


def _is(one: Any, other: Any) -> bool:
    length = float(np.linalg.norm(other))
    return length > 0 and bool(np.linalg.norm(one - other) <= EXPLAINED * length)


def _round(value: float) -> str:
    """Format a rounded number if ``value`` is near one: 0.998 as 1."""
    rounded = float(f"{value:.1g}")
    return f"{rounded:.1f}" if abs(value / rounded - 1) < EXPLAINED else f"{value:.3g}"
