"""A sweep whose journal is lost or damaged goes on from the folders of its trials."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sweeping.jobs import InstantJob, starts, sweep_request
from tests.sweeping.test_kills import Killed, curves, dying

from mtrain.errors import UsageError
from mtrain_sweep import definition as definitions
from mtrain_sweep import recovered, starting
from mtrain_sweep import search as sweep
from mtrain_sweep.journal import Journal
from mtrain_sweep.places import TrialFiles


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sweep, "LocalJob", InstantJob)
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    monkeypatch.setattr(sweep, "refuse_what_cannot_work", lambda plan: None)
    monkeypatch.setattr(sweep.outputs, "_draw", lambda *arguments: None)
    monkeypatch.setattr(InstantJob, "metrics", staticmethod(curves), raising=False)
    return


def run(folder: Path, **settings: Any) -> list[str]:
    """Run a sweep, or go on with it; return what it told."""
    told: list[str] = []
    sweep.run(starting.prepare(sweep_request(folder, tell=told.append, **settings)))
    return told


def table(folder: Path) -> str:
    return (folder / "trials.csv").read_text()


def deleted(file: Path) -> None:
    file.unlink()


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_its_last_page(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4096])


def overwritten(file: Path) -> None:
    file.write_bytes(b"no database")


def without_its_notes(file: Path) -> None:
    """Overwrite the page of a table whose loss SQLite does not notice by itself."""
    with contextlib.closing(sqlite3.connect(file)) as opened:
        (root,) = opened.execute("select rootpage from sqlite_master where name = 'trial_user_attributes'").fetchone()
        (size,) = opened.execute("pragma page_size").fetchone()
    content = bytearray(file.read_bytes())
    content[(root - 1) * size : root * size] = bytes(size)
    file.write_bytes(content)


DAMAGES = (deleted, halved, without_its_last_page, overwritten, without_its_notes)


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a finished sweep with a failed and a pruned trial, made once."""
    folder = tmp_path_factory.getbasetemp() / "finished"
    if not (folder / "trials.csv").exists():
        run(folder, trials=5, sampler="evolve", pruner="halving")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_sweep_has_its_table_again_and_trains_nothing_twice(
    damage: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "sweep"))
    before = table(folder)
    assert {"done", "failed", "pruned"} == {line.split(",")[1] for line in before.splitlines()[1:]}
    damage(folder / "study.db")
    if damage is not deleted:
        with pytest.raises(UsageError, match=r"study.db: .*`mtrain sweep --resume --out FOLDER`"):
            starting.open_sweep(folder)
    (folder / "trials.csv").unlink()
    told = run(folder, trials=5, sampler="evolve", pruner="halving", resume=True)
    assert "the journal has no trials: they are read from their folders again" in told
    assert table(folder) == before
    assert starts(folder) == [0, 1, 2, 3, 4, 2]  # the one that had failed is tried again
    assert (folder / "study.db.damaged-1").exists() == (damage is not deleted)


@pytest.mark.parametrize(("sampler", "trials"), [("evolve", 5), pytest.param("cmaes", 8, marks=pytest.mark.slow)])
def test_a_journal_that_is_lost_at_any_kill_changes_no_row(
    sampler: str, trials: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"trials": trials, "sampler": sampler, "pruner": "halving"}
    run(tmp_path / "whole", **settings)
    folder, deaths = tmp_path / "lost", 0
    for turn in range(99):
        try:
            with monkeypatch.context() as patch:
                dying(patch, 15 + 6 * turn, after=turn % 2 == 1)
                run(folder, resume=True, **settings)
            break
        except Killed:
            DAMAGES[deaths % len(DAMAGES)](folder / "study.db")
            deaths += 1
    assert deaths > 1
    assert table(folder) == table(tmp_path / "whole")


def test_trials_that_ran_at_the_same_time_keep_their_values(tmp_path: Path) -> None:
    # Proposed one by one, the trials of a journal without them would have other values than the runs have.
    folder, settings = tmp_path / "sweep", {"trials": 7, "sampler": "evolve", "max_failures": 9}
    run(folder, jobs=4, **settings)
    before = table(folder)
    (folder / "study.db").unlink()
    run(folder, resume=True, **settings)
    assert table(folder) == before
    assert starts(folder) == [*range(7), 2]


def half(file: Path) -> None:
    file.write_text(file.read_text()[: len(file.read_text()) // 2])


def real_summaries(folder: Path, number: int) -> Path:
    """Let a trial's summary say how far the run came, as that of a real run does; return the run folder."""
    run_dir = TrialFiles(folder, number).run_dir
    (run_dir / "summary.json").write_text(json.dumps({"reason": "done", "last": {"update": 12}}))
    return run_dir


def test_a_trial_with_a_half_written_result_is_made_again(tmp_path: Path) -> None:
    folder, settings = tmp_path / "sweep", {"trials": 6, "sampler": "random"}
    run(folder, **settings)
    before = table(folder)
    runs = {number: real_summaries(folder, number) for number in (0, 1, 3, 4)}
    half(runs[1] / "summary.json")
    half(runs[3] / "metrics.jsonl")
    half(folder / "specs" / "0004.yml")
    (folder / "study.db").unlink()
    told = run(folder, resume=True, **settings)
    assert table(folder) == before
    again = starts(folder)[6:]
    assert again == [1, 2, 3, 4]  # neither 0 nor 5
    assert [path.name for path in sorted((folder / "trials").glob("*-damaged*"))] == ["0003-damaged", "0004-damaged"]
    assert sum("its run cannot be read as a whole" in line for line in told) == 2


def test_a_trial_whose_spec_lacks_its_last_line_alone_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    run(folder, trials=1)
    place = TrialFiles(folder, 0)
    (proposal,) = starting.open_sweep(folder).trials
    place.spec.write_text("".join(place.spec.read_text().splitlines(keepends=True)[:-1]))
    recovered.as_in_folder(proposal, place, definitions.read(folder), tell=lambda text: None)
    assert (folder / "trials" / "0000-damaged").exists()


def test_the_spec_of_the_run_stands_in_for_a_lost_one(tmp_path: Path) -> None:
    folder, settings = tmp_path / "sweep", {"trials": 4, "sampler": "random"}
    run(folder, **settings)
    before = table(folder)
    (folder / "specs" / "0001.yml").rename(TrialFiles(folder, 1).run_dir / "spec.yml")
    (folder / "study.db").unlink()
    run(folder, resume=True, **settings)
    assert table(folder) == before
    assert starts(folder)[4:] == [2]


def test_choices_are_found_again_by_what_they_stand_for(tmp_path: Path) -> None:
    over = ["backend=ddp,deepspeed,deepspeed:stage=1", "train.batch_size=16,32"]
    folder, settings = tmp_path / "sweep", {"trials": 6, "space": None, "over": over, "sampler": "random"}
    run(folder, jobs=2, max_failures=9, **settings)
    before = table(folder)
    assert len({line.split(",")[4] for line in before.splitlines()[1:]}) == 3
    (folder / "study.db").unlink()
    run(folder, resume=True, **settings)
    assert table(folder) == before


def test_a_journal_left_behind_by_sqlite_does_not_reach_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    run(folder, trials=2, sampler="random")
    (folder / "study.db").unlink()
    (folder / "study.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(4096))
    run(folder, trials=2, sampler="random", resume=True)
    assert not (folder / "study.db-journal").exists()
    journal = Journal(folder)
    assert len(journal.trials()) == 2
    journal.close()
