"""Mutate the best trials so far: an evolution strategy with a small population of parents."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

PARENTS = 5
"""Size of the population: a child descends from one of so many best trials."""
CHANCE = 0.8
"""Probability that a number is changed."""
CHOICE_CHANCE = 0.2
"""Probability that a choice is changed."""
SPREAD = 0.5
"""Largest standard deviation of a change, as a share of the range; most are much smaller."""


class Evolution:
    """Proposes the start values first, and then changed copies of good trials.

    A parent is drawn from the best trials, the better the more often. Each of its numbers changes with probability
    ``CHANCE`` by a normal deviate, whose standard deviation lies between 0 and ``SPREAD`` times the range, small ones
    the more often; in a logarithmic range, the logarithm changes. A child that equals its parent is drawn again.
    """

    def __init__(self, start: Mapping[str, Any], *, seed: int) -> None:
        self._start = start
        self._random = np.random.default_rng(seed)

    def child(
        self, trials: Sequence[FrozenTrial], space: Mapping[str, BaseDistribution], *, maximise: bool
    ) -> dict[str, Any]:
        """Return the parameters of a new trial."""
        start = {name: within(self._start.get(name), distribution) for name, distribution in space.items()}
        if not trials:
            return start
        parent = self._parent(trials, maximise=maximise) or start
        for _ in range(100):
            child = {name: self._mutate(parent[name], distribution) for name, distribution in space.items()}
            if child != parent:
                return child
        return parent

    def _parent(self, trials: Sequence[FrozenTrial], *, maximise: bool) -> dict[str, Any] | None:
        scored = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
        best = sorted(scored, key=lambda trial: (-1 if maximise else 1) * (trial.value or 0.0))[:PARENTS]
        if not best:
            return None
        # By rank, not by value: values of different metrics differ in scale, and may be negative.
        weights = np.arange(len(best), 0, -1, dtype=float)
        return dict(best[self._random.choice(len(best), p=weights / weights.sum())].params)

    def _mutate(self, value: Any, distribution: BaseDistribution) -> Any:
        # Every draw is made whether it is needed or not, so that a parameter does not depend on the luck of another.
        luck, spread, deviate = self._random.random(), self._random.random() ** 2 * SPREAD, self._random.normal()
        if isinstance(distribution, CategoricalDistribution):
            other = distribution.choices[self._random.integers(len(distribution.choices))]
            return other if luck < CHOICE_CHANCE else value
        assert isinstance(distribution, FloatDistribution | IntDistribution)
        if luck >= CHANCE:
            return value
        low, high, number = (np.log(x) if distribution.log else x for x in (distribution.low, distribution.high, value))
        moved = number + deviate * spread * (high - low)
        return within(float(np.exp(moved) if distribution.log else moved), distribution)


def within(value: Any, distribution: BaseDistribution) -> Any:
    """Return the value that is nearest to ``value`` in the range; the middle of the range, or the first choice, for None."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[0] if value is None else value
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    if value is None:
        value = float(np.sqrt(low * high)) if distribution.log else (low + high) / 2
    value = min(max(value, low), high)
    if step is not None:
        value = low + round((value - low) / step) * step
        value = value - step if value > high else value
    return round(value) if isinstance(distribution, IntDistribution) else float(value)
