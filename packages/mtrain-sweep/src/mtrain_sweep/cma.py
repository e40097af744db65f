"""Propose numbers by the covariance matrix adaptation evolution strategy (CMA-ES; Hansen 2016, arXiv:1604.00772).

The strategy's state is never stored: it is made again for each proposal, by telling a new one the trials that have ended.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cmaes import CMA
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from mtrain_sweep.evolve import within

GENERATION = "generation"
"""Note in a trial: number of the generation that it belongs to, from 0."""
SIGMA = 0.3
"""First standard deviation, as a share of each range; Hansen's advice where the optimum may be anywhere in it."""


class Strategy:
    """Proposes the values of one trial.

    A generation is complete when enough of its trials have a value; its best ones then move the mean and shape the
    covariance of the next one. The first mean is the values of the spec. Choices are drawn at random, since the strategy
    knows numbers only.
    """

    def __init__(self, start: Mapping[str, Any], space: Mapping[str, BaseDistribution], *, seed: int) -> None:
        self._space = space
        self._numbers = {name: one for name, one in space.items() if not isinstance(one, CategoricalDistribution)}
        self._start = {name: within(start.get(name), one) for name, one in self._numbers.items()}
        self._seeds = np.random.SeedSequence(seed)

    def proposal(self, trials: Sequence[FrozenTrial], *, maximise: bool) -> tuple[dict[str, Any], int]:
        """Return the values of a new trial, and the number of its generation."""
        numbers_seed, choices_seed = self._seeds.spawn(2)
        strategy = self._tell_generations(trials, -1.0 if maximise else 1.0)
        strategy.reseed_rng(int(numbers_seed.generate_state(1)[0]))
        shares = dict(zip(self._numbers, strategy.ask(), strict=True))
        random = np.random.default_rng(choices_seed)
        params: dict[str, Any] = {}
        for name, distribution in self._space.items():
            if isinstance(distribution, CategoricalDistribution):
                params[name] = distribution.choices[random.integers(len(distribution.choices))]
            else:
                params[name] = _value(float(shares[name]), distribution)
        return params, strategy.generation

    def _tell_generations(self, trials: Sequence[FrozenTrial], sign: float) -> CMA:
        """Return a strategy that has been told all complete generations."""
        bounds = np.array([[0.0, 1.0]] * len(self._numbers))
        strategy = CMA(mean=self._shares(self._start), sigma=SIGMA, bounds=bounds)
        done = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.value is not None]
        while True:
            members = [one for one in done if one.system_attrs.get(GENERATION) == strategy.generation]
            if len(members) < strategy.population_size:
                return strategy
            members = members[: strategy.population_size]
            strategy.tell([(self._shares(one.params), sign * float(one.value or 0.0)) for one in members])

    def _shares(self, values: Mapping[str, Any]) -> NDArray[np.float64]:
        return np.array([_share(values[name], one) for name, one in self._numbers.items()])


def _scale(distribution: BaseDistribution) -> tuple[float, float]:
    """Return the ends of a range, as logarithms where the logarithm is searched."""
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high = float(distribution.low), float(distribution.high)
    return (float(np.log(low)), float(np.log(high))) if distribution.log else (low, high)


def _share(value: Any, distribution: BaseDistribution) -> float:
    """Return where a value lies in its range, from 0 to 1; the middle where the range has one value only."""
    low, high = _scale(distribution)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    number = float(np.log(value)) if distribution.log else float(value)
    return (number - low) / (high - low) if high > low else 0.5


def _value(share: float, distribution: BaseDistribution) -> Any:
    """Return the value at a share of the range, rounded to the range's step."""
    low, high = _scale(distribution)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    number = low + share * (high - low)
    return within(float(np.exp(number)) if distribution.log else number, distribution)
