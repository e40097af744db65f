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


# TPE learns after ten trials, CMA-ES after a generation of six.
@pytest.mark.parametrize(("sampler", "count"), [("random", 3), ("tpe", 12), ("cmaes", 8), ("evolve", 4)])
def test_a_proposal_does_not_depend_on_when_the_journal_was_opened(sampler: str, count: int, tmp_path: Path) -> None:
    asked = definition(sampler, NUMBERS if sampler == "cmaes" else SPACE)
    once = searched(asked, count)
    assert once == searched_on_disk(tmp_path, asked, count)
    assert len({str(params) for params in once}) == count
    assert searched(asked.model_copy(update={"seed": 4}), count) != once


def test_all_values_stay_in_their_ranges() -> None:
    for sampler in ("random", "tpe", "cmaes", "evolve"):
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


def test_evolution_begins_with_the_spec_and_gets_better() -> None:
    asked = definition("evolve", NUMBERS)
    start = [one.model_copy(update={"start": {"a": 0.5, "d": 0.0}[one.name]}) for one in asked.parameters]
    params = searched(asked.model_copy(update={"parameters": tuple(start)}), 40)
    assert params[0] == {"a": 0.5, "d": 0.0}
    scores = [score_of(one) for one in params]
    assert max(scores) > -0.5  # it begins at -1
    assert sum(scores[20:]) / 20 > sum(scores[:20]) / 20


def test_cma_es_begins_around_the_spec_and_gets_better() -> None:
    asked = definition("cmaes", NUMBERS)
    start = [one.model_copy(update={"start": {"a": 0.5, "d": 0.9}[one.name]}) for one in asked.parameters]
    params = searched(asked.model_copy(update={"parameters": tuple(start)}), 42)
    assert sum(one["d"] > 0.5 for one in params[:6]) > 4
    scores = [score_of(one) for one in params]
    assert sum(scores[30:]) / 12 > sum(scores[:12]) / 12 + 0.1


def test_tpe_comes_nearer_to_a_known_optimum_than_random_values() -> None:
    ends = {sampler: [search(PROBLEMS["rates"], sampler, trials=30, seed=seed)[-1] for seed in range(5)]
            for sampler in ("random", "tpe")}  # fmt: skip
    assert sum(tpe < random for tpe, random in zip(ends["tpe"], ends["random"], strict=True)) >= 4
    assert sum(ends["tpe"]) < sum(ends["random"]) / 2


def test_the_journal_holds_no_object_that_reading_it_would_make(tmp_path: Path) -> None:
    searched_on_disk(tmp_path, definition("cmaes", NUMBERS), 8)
    journal = Journal(tmp_path)
    assert [trial.system_attrs for trial in journal.trials()] == [{"generation": i // 6} for i in range(8)]
    journal.close()


def test_evolution_leaves_zero_behind() -> None:
    asked = definition("evolve", {"d": NUMBERS["d"], "a": NUMBERS["a"]})
    zero = tuple(one.model_copy(update={"start": {"a": 0.5, "d": 0.0}[one.name]}) for one in asked.parameters)
    assert any(one["d"] > 0 for one in searched(asked.model_copy(update={"parameters": zero}), 6))


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


def test_an_axis_with_few_values_is_labelled_with_these() -> None:
    from mtrain_sweep.plots import _round_values

    stepped, many, whole = read_space(
        {
            "model.options.width": {"low": 16, "high": 64, "step": 16},
            "b": {"low": 0, "high": 100, "step": 5},
            "c": {"low": 1, "high": 4},
        }
    )
    assert _round_values(stepped) == [16, 32, 48, 64]
    assert _round_values(many) == [0, 25, 50, 75, 100]
    assert _round_values(whole) == [1, 2, 3, 4]


def test_the_value_that_matters_is_the_most_important_one() -> None:
    from mtrain_sweep.plots import importances

    numbers = {name: {"low": 0.0, "high": 1.0} for name in ("a", "b", "c", "d")}
    right = 0
    for seed in range(6):
        asked = definition("random", numbers, seed=seed, trials=16)
        trials = [propose(asked, [], number) for number in range(16)]
        done = [
            create_trial(
                value=one.params["b"] + one.params["c"] / 8, params=one.params, distributions=one.distributions
            )
            for one in trials
        ]
        right += next(iter(importances(asked, done))) == "b"
    assert right >= 5
