"""Propose the values of the next trial, and judge a running one, as functions of the trials so far.

Optuna's samplers and pruners keep state: random numbers, and notes in the trials of their study. Here each decision is made
by a fresh one in a study in memory, which is filled from the journal. So a decision depends only on the seed, the number of
the trial and the trials before it, and a sweep that was killed decides again what it had decided.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.space import Parameter

DIRECTIONS = {"max": StudyDirection.MAXIMIZE, "min": StudyDirection.MINIMIZE}
MEDIAN_STARTUP = 3
"""Finished trials before the pruner `median` prunes."""
HALVING_FACTOR = 2
"""The pruner `halving` lets the better one of so many trials pass each rung; rungs are 1, 2, 4, 8 ... evaluations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the pruner says of a running trial."""

    pruned: bool
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the pruner must know about this trial when it judges others."""


def distributions(parameters: Sequence[Parameter]) -> dict[str, BaseDistribution]:
    """Return the parameters as Optuna's distributions, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on steps that do not divide a range exactly, and on choices of mixed types
        return {parameter.name: _distribution(parameter) for parameter in parameters}


def _distribution(parameter: Parameter) -> BaseDistribution:
    if parameter.kind == "choice":
        return CategoricalDistribution(parameter.choices)
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.kind == "int":
        highest = high if step is None else low + math.floor((high - low) / step) * step
        return IntDistribution(int(low), int(highest), log=parameter.log, step=int(step or 1))
    if step is not None:
        high = low + math.floor((high - low) / step + 1e-9) * step
    return FloatDistribution(float(low), float(high), log=parameter.log, step=None if step is None else float(step))


def seed_of(seed: int, number: int) -> int:
    """Return the seed of one trial's proposal."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def propose(definition: SweepDefinition, trials: Sequence[FrozenTrial], number: int) -> FrozenTrial:
    """Return trial ``number``, to be added to the journal, given those before it."""
    space = distributions(definition.parameters)
    notes: Mapping[str, Any] = {}
    if definition.sampler == "grid":
        params = grid_point(definition.parameters, number)
    else:
        study = _study(definition, trials, sampler=_sampler(definition.sampler, seed_of(definition.seed, number)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # choices of mixed types, and notes on experimental parts of Optuna
            study.ask(fixed_distributions=space)
        asked = study.get_trials(deepcopy=False)[-1]
        params, notes = asked.params, asked.system_attrs
    return create_trial(state=TrialState.RUNNING, params=params, distributions=space, system_attrs=dict(notes))


def grid_point(parameters: Sequence[Parameter], number: int) -> dict[str, Any]:
    """Return one point of the grid; the last parameter changes fastest."""
    point = {}
    for parameter in reversed(parameters):
        number, position = divmod(number, len(parameter.grid()))
        point[parameter.name] = parameter.grid()[position]
    return {parameter.name: point[parameter.name] for parameter in parameters}


def judge(definition: SweepDefinition, others: Sequence[FrozenTrial], values: Sequence[float]) -> Judgement:
    """Judge a trial by the metric after each of its evaluations so far; all before the last one have passed."""
    if definition.pruner == "none":
        return Judgement(pruned=False)
    pruner: optuna.pruners.BasePruner = (
        optuna.pruners.MedianPruner(n_startup_trials=MEDIAN_STARTUP)
        if definition.pruner == "median"
        else optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=HALVING_FACTOR)
    )
    study = _study(definition, others, pruner=pruner)
    trial, pruned = study.ask(), False
    for step, value in enumerate(values, start=1):
        trial.report(value, step)
        pruned = trial.should_prune()
    return Judgement(pruned=pruned, notes=study.get_trials(deepcopy=False)[-1].system_attrs)


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed)


def _study(
    definition: SweepDefinition,
    trials: Sequence[FrozenTrial],
    *,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
) -> optuna.Study:
    """Return a study in memory with these trials."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(direction=DIRECTIONS[definition.direction], sampler=sampler, pruner=pruner)
        for trial in trials:
            study.add_trial(trial)
    return study
