"""Proposals and judgements are functions of the seed, the number of a trial and the trials before it."""

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from benchmarks.search_samplers import PROBLEMS, search
from mtrain.errors import UsageError
from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.journal import Journal
from mtrain_sweep.proposals import judge, propose
from mtrain_sweep.space import read_space

SPACE = {
    "a": {"low": 0.001, "high": 1.0, "log": True},
    "b": {"low": 1, "high": 9, "step": 2},
    "c": {"choices": ["x", True, 1.5, [1, 2]]},
    "d": {"low": 0.0, "high": 1.0},
}
NUMBERS = {name: SPACE[name] for name in ("a", "d")}


def definition(sampler: str, space: Any = SPACE, **values: Any) -> SweepDefinition:
    base = {"pruner": "none", "metric": "score", "direction": "max", "seed": 3, "trials": 9, "folder": "/", "base": {}}
    return SweepDefinition(sampler=sampler, parameters=tuple(read_space(space)), **{**base, **values})  # type: ignore[arg-type]


def score_of(params: dict[str, Any]) -> float:
    return float(-abs(params["d"] - 0.6) - abs(params["a"] - 0.1))


def searched(asked: SweepDefinition, count: int) -> list[dict[str, Any]]:
    """Run `count` trials of a function, without a journal."""
    trials: list[FrozenTrial] = []
    for number in range(count):
        trial = propose(asked, trials, number)
        notes = {"params": trial.params, "distributions": trial.distributions, "system_attrs": trial.system_attrs}
        trials.append(create_trial(value=score_of(trial.params), **notes))  # type: ignore[arg-type]
    return [trial.params for trial in trials]


def searched_on_disk(folder: Path, asked: SweepDefinition, count: int) -> list[dict[str, Any]]:
    """Run `count` trials of a function; the journal is opened anew for every trial."""
    for number in range(count):
        journal = Journal(folder, direction=asked.direction)
        assert journal.add(propose(asked, journal.trials(), number)) == number
        journal.end(number, TrialState.COMPLETE, value=score_of(journal.trials()[number].params), notes={})
        params = [trial.params for trial in journal.trials()]
        journal.close()
    return params


# TPE learns after ten trials.
@pytest.mark.parametrize(("sampler", "count"), [("random", 3), ("tpe", 12)])
def test_a_proposal_does_not_depend_on_when_the_journal_was_opened(sampler: str, count: int, tmp_path: Path) -> None:
    asked = definition(sampler)
    once = searched(asked, count)
    assert once == searched_on_disk(tmp_path, asked, count)
    assert len({str(params) for params in once}) == count
    assert searched(asked.model_copy(update={"seed": 4}), count) != once


def test_all_values_stay_in_their_ranges() -> None:
    for sampler in ("random", "tpe"):
        for params in searched(definition(sampler), 12):
            assert 0.001 <= params["a"] <= 1
            assert params["b"] in (1, 3, 5, 7, 9)
            assert params["c"] in ("x", True, 1.5, "[1, 2]")
            assert 0 <= params["d"] <= 1


def test_a_grid_has_every_point_once_and_needs_an_end() -> None:
    space = {
        "b": {"low": 1, "high": 9, "step": 4},
        "c": {"choices": ["x", "y"]},
        "e": {"low": 0.1, "high": 0.3, "step": 0.1},
    }
    asked = definition("grid", space)
    points = [propose(asked, [], number).params for number in range(asked.grid_size)]
    assert len(points) == 18
    assert len({tuple(point.values()) for point in points}) == 18
    with pytest.raises(UsageError, match="a grid needs"):
        _ = definition("grid").grid_size


def test_tpe_comes_nearer_to_a_known_optimum_than_random_values() -> None:
    ends = {sampler: [search(PROBLEMS["rates"], sampler, trials=30, seed=seed)[-1] for seed in range(5)]
            for sampler in ("random", "tpe")}  # fmt: skip
    assert sum(tpe < random for tpe, random in zip(ends["tpe"], ends["random"], strict=True)) >= 4
    assert sum(ends["tpe"]) < sum(ends["random"]) / 2


def history(tmp_path: Path, asked: SweepDefinition, curves: list[list[float]]) -> Any:
    journal = Journal(tmp_path, direction=asked.direction)
    for number, curve in enumerate(curves):
        journal.add(propose(asked, journal.trials(), number))
        for step in range(1, len(curve) + 1):
            others = journal.trials()[:number]
            journal.report(number, step, curve[step - 1], judge(asked, others, curve[:step]).notes)
        journal.end(number, TrialState.COMPLETE, value=curve[-1], notes={})
    trials = journal.trials()
    journal.close()
    return trials


@pytest.mark.parametrize("pruner", ["median", "halving"])
@pytest.mark.parametrize("direction", ["max", "min"])
def test_a_bad_trial_is_pruned_and_a_good_one_is_not(pruner: str, direction: str, tmp_path: Path) -> None:
    sign = 1 if direction == "max" else -1
    asked = definition("random", pruner=pruner, direction=direction)
    others = history(tmp_path, asked, [[sign * 0.5, sign * (0.6 + i / 100)] for i in range(4)])
    assert judge(asked, others, [sign * 0.1]).pruned
    assert not judge(asked, others, [sign * 0.9]).pruned
    assert judge(asked, others, [sign * 0.1]) == judge(asked, others, [sign * 0.1])
    assert not judge(definition("random", pruner="none"), others, [sign * 0.1]).pruned
