"""A sweep whose journal is lost or damaged is refused in words, and nothing of its folder changes."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sweeping.jobs import InstantJob, starts, sweep_request
from tests.sweeping.test_kills import curves

from mtrain.errors import UsageError
from mtrain_sweep import search as sweep
from mtrain_sweep import starting


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sweep, "LocalJob", InstantJob)
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    monkeypatch.setattr(sweep, "refuse_what_cannot_work", lambda plan: None)
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
    """A folder of a finished sweep, made once."""
    folder = tmp_path_factory.getbasetemp() / "finished"
    if not (folder / "trials.csv").exists():
        run(folder, trials=2, sampler="random")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_sweep_whose_journal_is_lost_or_damaged_is_refused_and_trains_nothing(
    damage: Callable[[Path], None], finished: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "sweep"))
    damage(folder / "study.db")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    for act in (starting.open_sweep, lambda folder: run(folder, trials=2, sampler="random", resume=True)):
        with pytest.raises(UsageError, match=r"study.db.*(damaged|removed).*begin another sweep"):
            act(folder)
    assert {path: path.read_bytes() for path in files} == files
    assert starts(folder) == [0, 1]
