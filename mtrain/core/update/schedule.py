"""Learning rate and momentum as pure functions of the update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.core.interfaces import Rates
from mtrain.core.update.recipe import scaling
from mtrain.errors import SpecError
from mtrain.spec.model import Spec
from mtrain.spec.training import PruneSpec, ScheduleSpec

ONE_CYCLE_START = 1 / 25
"""Factor at the start of a one-cycle schedule (Smith and Topin, arXiv 1708.07120), with the usual divisor 25."""


def total_updates(spec: Spec, updates_per_epoch: int) -> int:
    """Return the number of updates of the whole job.

    Raises:
        SpecError: neither ``train.epochs`` nor ``train.updates`` is set.
    """
    if spec.train.updates is not None:
        return spec.train.updates
    if spec.train.epochs is None:
        raise SpecError("train: neither `epochs` nor `updates` is given; say how long to train, e.g. train.epochs: 100")
    return spec.train.epochs * updates_per_epoch


def factor(curve: ScheduleSpec, epoch: float, *, horizon_epochs: float, step_epochs: float = 0.0) -> float:
    """Return the factor of the learning rate at ``epoch``, which is fractional if the schedule is per update.

    linear, cosine, polynomial and exponential go from 1 to ``final_factor`` over the horizon and stay there:
    polynomial with the remaining share of the horizon to the power ``power`` ("poly" of DeepLab, arXiv 1606.00915), and
    exponential by the same factor in each epoch. step multiplies by ``gamma`` at each milestone; one_cycle rises to 1
    at ``peak`` of the horizon and falls to ``final_factor``, both as half cosines. As in torch's ``OneCycleLR`` it has its
    peak and its end one step early, so that the last update has the last factor; ``step_epochs`` is the length of a step.
    """
    # A job may train on after the horizon, at the factor with which that ended.
    share = min(max(epoch / horizon_epochs, 0.0), 1.0)
    if curve.name == "linear":
        return (1 - share) * (1 - curve.final_factor) + curve.final_factor
    if curve.name == "cosine":
        return _half_cosine(1.0, curve.final_factor, share)
    if curve.name == "polynomial":
        return float((1 - share) ** curve.power) * (1 - curve.final_factor) + curve.final_factor
    if curve.name == "exponential":
        return float(curve.final_factor**share)
    if curve.name == "step":
        return float(curve.gamma ** sum(milestone <= epoch for milestone in curve.milestones))
    if curve.name == "one_cycle":
        return _one_cycle(
            curve, epoch, peak=curve.peak * horizon_epochs - step_epochs, end=horizon_epochs - step_epochs
        )
    return 1.0


def _one_cycle(curve: ScheduleSpec, epoch: float, *, peak: float, end: float) -> float:
    """Return the factor of a one-cycle schedule at ``epoch``; ``peak`` and ``end`` are epochs too."""
    if epoch < peak:
        return _half_cosine(ONE_CYCLE_START, 1.0, epoch / peak)
    if end <= peak:
        return 1.0
    return _half_cosine(1.0, curve.final_factor, min((epoch - peak) / (end - peak), 1.0))


def _half_cosine(start: float, end: float, share: float) -> float:
    return start + (end - start) * (1 - math.cos(math.pi * share)) / 2


class SparsityCurve:
    """The share of zeros in pruned arrays, for each update: ``curve(update) -> share``, or None if masks stay.

    Zhu and Gupta 2017 (arXiv 1710.01878), equation 1. Masks are chosen again after the curve's end as well, so that a
    choice which was due in an update that was skipped is made up for.
    """

    def __init__(self, prune: PruneSpec, *, total_updates: int) -> None:
        self._final = prune.sparsity
        self._first = min(math.ceil(prune.start * total_updates), max(total_updates - 1, 0))
        # At least one update after the first, or the curve would have no length to divide by.
        self._last = min(max(math.ceil(prune.end * total_updates), self._first + 1), max(total_updates - 1, 0))
        self._every = prune.every_updates

    def __call__(self, update: int) -> float | None:
        """Return the share of zeros after ``update`` (0-based), if masks are chosen then."""
        since = update - self._first
        # The last choice is made even between two turns: it brings the share that was asked for.
        if since < 0 or (since % self._every and update != self._last):
            return None
        t = min(since / max(self._last - self._first, 1), 1.0)
        return self._final * (1 - (1 - t) ** 3) if update < self._last else self._final


@dataclass(frozen=True, kw_only=True, slots=True)
class _Warmup:
    updates: int
    learning_rates_from: Sequence[float]
    momentum_from: float | None


HAVE_MOMENTUM = ("sgd", "rmsprop")
"""Rules whose momentum a warm-up can change. YOLOv5 leaves the betas of the others alone (``if "momentum" in x``)."""


class Schedule:
    """The learning rates of all groups and the momentum, for each update: ``schedule(update) -> Rates``.

    During warm-up, learning rate and momentum change linearly with the update, from their start values to the values of the
    curve at the current epoch, as in YOLOv5 (biases go down from a high learning rate, all others up from 0). With
    ``warmup.before_curve`` the curve stays at its first value during warm-up and then takes the rest of the horizon, as
    in PaddleDetection.
    """

    def __init__(self, spec: Spec, *, updates_per_epoch: int, total_updates: int) -> None:
        self._curve = spec.schedule
        self._updates_per_epoch = updates_per_epoch
        self._horizon = spec.schedule.horizon_epochs or max(total_updates / updates_per_epoch, 1e-9)
        learning_rate = spec.optimizer.learning_rate * scaling(spec).learning_rate
        self._rates = tuple(learning_rate * group.learning_rate_factor for group in spec.optimizer.groups)
        self._momentum = spec.optimizer.momentum
        self._warmup = _warmup(spec, updates_per_epoch)
        before = spec.schedule.warmup is not None and spec.schedule.warmup.before_curve
        self._begin = self._warmup.updates if before else 0
        self._sparsity: SparsityCurve | None = None
        if spec.train.prune is not None and spec.train.prune.sparsity > 0:
            self._sparsity = SparsityCurve(spec.train.prune, total_updates=total_updates)

    @property
    def warmup_updates(self) -> int:
        """Number of updates of the warm-up."""
        return self._warmup.updates

    def __call__(self, update: int) -> Rates:
        """Return the learning rates and the momentum of ``update`` (0-based, over the whole job)."""
        # A curve that begins after the warm-up has the rest of the horizon to itself.
        since = max(update - self._begin, 0)
        per_update = since / self._updates_per_epoch
        epoch = per_update if self._curve.per == "update" else float(since // self._updates_per_epoch)
        horizon = max(self._horizon - self._begin / self._updates_per_epoch, 1e-9)
        step = 1 / self._updates_per_epoch if self._curve.per == "update" else 1.0
        scale = factor(self._curve, epoch, horizon_epochs=horizon, step_epochs=step)
        targets = [learning_rate * scale for learning_rate in self._rates]
        warmup = self._warmup
        sparsity = None if self._sparsity is None else self._sparsity(update)
        if update >= warmup.updates:
            return Rates(learning_rates=tuple(targets), sparsity=sparsity)
        share = update / warmup.updates
        rates = [start + (end - start) * share for start, end in zip(warmup.learning_rates_from, targets, strict=True)]
        momentum = None
        if warmup.momentum_from is not None:
            momentum = warmup.momentum_from + (self._momentum - warmup.momentum_from) * share
        return Rates(learning_rates=tuple(rates), momentum=momentum, sparsity=sparsity)


def _warmup(spec: Spec, updates_per_epoch: int) -> _Warmup:
    warmup = spec.schedule.warmup
    if warmup is None:
        return _Warmup(updates=0, learning_rates_from=(), momentum_from=None)
    return _Warmup(
        updates=max(round((warmup.epochs or 0.0) * updates_per_epoch), warmup.updates or 0),
        learning_rates_from=tuple(
            warmup.learning_rate_from if group.warmup_from is None else group.warmup_from
            for group in spec.optimizer.groups
        ),
        momentum_from=warmup.momentum_from if spec.optimizer.rule in HAVE_MOMENTUM else None,
    )
