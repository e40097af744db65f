"""Whom the children of an evolution descend from, and where their numbers lie."""

from collections import Counter

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from mtrain_sweep.evolve import PARENTS, Evolution, within

NAMES = tuple("abcdefghij")
SPACE = {"name": CategoricalDistribution(NAMES), "x": FloatDistribution(0.0, 1.0)}


def trials(*, maximise: bool) -> list[FrozenTrial]:
    """Trials whose values rise with the letter of their name, and failed ones of the worst name; no value is as good as 0."""
    first = -len(NAMES) if maximise else 1
    done = [
        create_trial(params={"name": name, "x": 0.5}, distributions=SPACE, value=float(first + number))
        for number, name in enumerate(NAMES)
    ]
    worst = {"name": NAMES[0 if maximise else -1], "x": 0.5}
    failed = [create_trial(params=worst, distributions=SPACE, state=TrialState.FAIL) for _ in range(3)]
    order = np.random.default_rng(0).permutation(len(done))
    return [*failed, *(done[number] for number in order)]


@pytest.mark.parametrize(("maximise", "best"), [(True, NAMES[::-1]), (False, NAMES)])
def test_children_descend_from_the_best_the_better_the_more_often(maximise: bool, best: tuple[str, ...]) -> None:
    names = Counter(
        Evolution({}, seed=seed).child(trials(maximise=maximise), SPACE, maximise=maximise)["name"]
        for seed in range(600)
    )
    counts = [names[name] for name in best]
    # The weights of the parents are 5 : 4 : 3 : 2 : 1; every fifth choice is drawn anew from all ten.
    expected = [600 * (0.8 * max(PARENTS - place, 0) / 15 + 0.02) for place in range(10)]
    assert counts == pytest.approx(expected, abs=45)
    assert counts[0] > counts[2] > counts[4]
    assert sum(counts[PARENTS:]) < 90


def test_numbers_stay_near_the_parent_and_in_the_range() -> None:
    space = {"x": FloatDistribution(1e-4, 1.0, log=True)}
    parent = create_trial(params={"x": 0.01}, distributions=space, value=1.0)
    children = [Evolution({}, seed=seed).child([parent], space, maximise=True)["x"] for seed in range(400)]
    logs = np.log10(children)
    assert all(1e-4 <= value <= 1.0 for value in children)
    assert abs(np.median(logs) + 2) < 0.1
    assert 0.3 < np.std(logs) < 1.2


def test_a_value_moves_to_the_nearest_one_of_the_range() -> None:
    assert within(7, IntDistribution(1, 9, step=4)) == 9
    assert within(6.9, IntDistribution(1, 9, step=4)) == 5
    assert within(0.96, FloatDistribution(0.0, 0.9, step=0.3)) == pytest.approx(0.9)
    assert within(-3.0, FloatDistribution(0.5, 2.0)) == 0.5
    assert within(None, FloatDistribution(0.01, 1.0, log=True)) == pytest.approx(0.1)
    assert within(None, FloatDistribution(1.0, 3.0)) == 2.0
