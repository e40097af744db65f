"""A sweep that dies at any write of its journal, and goes on, ends with the table of one that did not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import RDBStorage
from tests.sweeping.jobs import InstantJob, starts, sweep_request

from mtrain.errors import UsageError
from mtrain_sweep import search as sweep
from mtrain_sweep import starting
from mtrain_sweep.places import TrialFiles

WRITES = (
    "create_new_trial",
    "set_trial_system_attr",
    "set_trial_user_attr",
    "set_trial_intermediate_value",
    "set_trial_state_values",
)


class Killed(BaseException):
    """The process dies here."""


def curves(place: TrialFiles) -> list[float]:
    """Return the metric of a trial as a function of its spec; one of them fails."""
    import yaml

    values = yaml.safe_load(place.spec.read_text())
    learning_rate, batch = values["optimizer"]["learning_rate"], values["train"]["batch_size"]
    return [] if place.number == 2 else [learning_rate * step + batch / 1000 for step in (1, 2, 3)]


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sweep, "LocalJob", InstantJob)
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    monkeypatch.setattr(sweep, "refuse_what_cannot_work", lambda plan: None)
    monkeypatch.setattr(InstantJob, "metrics", staticmethod(curves), raising=False)
    return


def run(folder: Path, **settings: Any) -> sweep.SweepVerdict:
    return sweep.run(starting.prepare(sweep_request(folder, **settings)))


def dying(monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> Callable[[], int]:
    """Let the journal's write number `at` raise, before or after it is made; return a function that counts writes."""
    count = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == at and not after:
                raise Killed
            result = original(*arguments, **named)
            if count == at and after:
                raise Killed
            return result

        return write

    for name in WRITES:
        monkeypatch.setattr(RDBStorage, name, wrapped(getattr(RDBStorage, name)))
    return lambda: count


# TPE learns after ten trials.
@pytest.mark.parametrize(
    ("sampler", "pruner", "trials"),
    [("random", "halving", 5), pytest.param("tpe", "median", 13, marks=pytest.mark.slow)],
)
def test_a_sweep_killed_at_any_write_ends_with_the_same_table(
    sampler: str, pruner: str, trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"trials": trials, "sampler": sampler, "pruner": pruner}
    with monkeypatch.context() as patch:
        writes = dying(patch, -1, after=False)
        run(tmp_path / "whole", **settings)
    table = (tmp_path / "whole" / "trials.csv").read_text()
    states = {line.split(",")[1] for line in table.splitlines()[1:]}
    assert {"done", "failed"} <= states <= {"done", "pruned", "failed"}
    assert sampler != "random" or "pruned" in states
    # One sweep, which dies at its first write, resumed at its second, and so on until it needs fewer writes to end.
    folder, deaths = tmp_path / "killed", 0
    for turn in range(writes() + 2):
        try:
            with monkeypatch.context() as patch:
                dying(patch, 1 + turn, after=turn % 3 == 1)
                run(folder, resume=True, **settings)
            break
        except Killed:
            deaths += 1
    assert deaths > 8
    assert (folder / "trials.csv").read_text() == table


def test_with_several_jobs_no_trial_is_lost_or_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweep"
    for turn in range(60):
        try:
            with monkeypatch.context() as patch:
                dying(patch, 3 + turn % 5, after=turn % 2 == 0)
                run(folder, trials=7, jobs=3, sampler="random", resume=True, max_failures=9)
            break
        except Killed:
            continue
    rows = [line.split(",")[:2] for line in (folder / "trials.csv").read_text().splitlines()[1:]]
    assert [int(number) for number, _ in rows] == list(range(7))
    assert all(state in ("done", "failed") for _, state in rows)
    done = {int(number) for number, state in rows if state == "done"}
    assert all(starts(folder).count(number) == 1 for number in done)


def test_failures_in_a_row_end_the_sweep_and_it_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweep"
    with monkeypatch.context() as patch:
        patch.setattr(InstantJob, "metrics", staticmethod(lambda place: []))
        verdict = run(folder, trials=4, sampler="random", max_failures=2)
    assert (verdict.reason, verdict.code) == ("failed", 1)
    assert "2 trials in a row failed, the last one with: the gradient was not finite" in verdict.text
    assert run(folder, trials=4, sampler="random", resume=True).reason == "finished"
    states = [line.split(",")[1] for line in (folder / "trials.csv").read_text().splitlines()[1:]]
    assert states[:2] == ["failed", "failed"]
    assert "done" in states[2:]


def test_a_metric_that_evaluations_do_not_have_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--metric scroe: .*did you mean 'score'"):
        run(tmp_path / "sweep", trials=2, metric="scroe")


def test_more_trials_may_be_asked_for_later_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    run(folder, trials=2, sampler="random")
    first = (folder / "trials.csv").read_text()
    assert run(folder, trials=3, sampler="random", resume=True).reason == "finished"
    assert (folder / "trials.csv").read_text().startswith(first)
    for changed in (
        {"sampler": "tpe"},
        {"pruner": "median"},
        {"metric": "accuracy"},
        {"space": {"optimizer.learning_rate": {"choices": [1.0]}}},
    ):
        with pytest.raises(UsageError, match="begun with other settings"):
            starting.prepare(sweep_request(folder, resume=True, **changed))
    definition = json.loads((folder / "sweep.json").read_text())
    del definition["base"]["train"]["max_nonfinite"]  # as an mtrain would have written it that did not know the key
    (folder / "sweep.json").write_text(json.dumps(definition))
    starting.prepare(sweep_request(folder, resume=True))
    with pytest.raises(UsageError, match="holds a sweep already"):
        starting.prepare(sweep_request(folder))
