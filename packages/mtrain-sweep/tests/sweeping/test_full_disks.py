"""A full disk is no result of a trial, and no damage of a journal: the sweep ends in words, and goes on when there is room."""

from pathlib import Path
from typing import Any

import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError
from tests.sweeping.jobs import InstantJob, starts, sweep_request
from tests.sweeping.test_kills import curves

from mtrain.errors import UsageError
from mtrain.system import disk
from mtrain_sweep import search as sweep
from mtrain_sweep import starting
from mtrain_sweep.journal import Journal
from mtrain_sweep.trial_jobs import TrialEnd

FULL = OperationalError("INSERT", {}, Exception("database or disk is full"))


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sweep, "LocalJob", InstantJob)
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    monkeypatch.setattr(sweep, "refuse_what_cannot_work", lambda plan: None)
    monkeypatch.setattr(InstantJob, "metrics", staticmethod(curves), raising=False)


def run(folder: Path, **settings: Any) -> sweep.SweepVerdict:
    return sweep.run(starting.prepare(sweep_request(folder, trials=2, **settings)))


class Refused(InstantJob):
    """A job that found no room for its checkpoints."""

    metrics = staticmethod(lambda place: [])

    def poll(self) -> TrialEnd:
        return TrialEnd(code=2, reason="trials: 76.0 KiB free on its disk, make room, keep fewer")


class Dead(InstantJob):
    """A job that could not say why it failed."""

    metrics = staticmethod(lambda place: [])

    def poll(self) -> TrialEnd:
        return TrialEnd(code=1, reason="it printed nothing")


@pytest.mark.parametrize("job", [Refused, Dead])
def test_a_trial_without_room_ends_the_sweep_and_is_made_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: type[InstantJob]
) -> None:
    folder = tmp_path / "sweep"
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "LocalJob", job)
        patch.setattr(disk, "is_full", lambda folder: job is Dead)
        with pytest.raises(UsageError, match=r"trial 0: .*when there is room, go on with: mtrain sweep --resume --out"):
            run(folder)
    assert [trial.state for trial in starting.open_sweep(folder).trials] == [TrialState.RUNNING]
    assert run(folder, resume=True).code == 0
    assert starts(folder) == [0, 0, 1]


def test_a_trial_that_fails_while_there_is_room_is_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "LocalJob", Dead)
    assert run(tmp_path / "sweep").reason == "failed"
    assert {trial.state for trial in starting.open_sweep(tmp_path / "sweep").trials} == {TrialState.FAIL}


def wrapped() -> StorageInternalError:
    error = StorageInternalError("An exception is raised during the commit")
    error.__cause__ = FULL
    return error


@pytest.mark.parametrize("error", [FULL, wrapped()], ids=["plain", "wrapped"])
@pytest.mark.parametrize("verb", ["add", "end", "report"])
def test_a_journal_that_cannot_be_written_is_named_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, error: Exception
) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Journal, verb, fails)
        with pytest.raises(
            UsageError, match="the journal cannot be written to: database or disk is full; make room"
        ) as told:
            run(tmp_path / "sweep")
    assert "go on with: mtrain sweep --resume" in str(told.value)
    assert run(tmp_path / "sweep", resume=True).code == 0


def test_a_journal_on_a_full_disk_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    run(folder)

    def fails(*arguments: Any) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "trials", fails)
        with pytest.raises(UsageError, match=r"cannot be read now .*disk is full"):
            run(folder, resume=True)
    assert len(starting.open_sweep(folder).trials) == 2
