"""The checkpoint of a resumed job is chosen while its run folder is locked."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint.store import Checkpoints
from mtrain.core.interfaces import Progress, State
from mtrain.errors import UsageError
from mtrain.jobs.brief import Brief
from mtrain.jobs.hosts.agent import Agent
from mtrain.jobs.place import hold_place
from mtrain.spec import config
from mtrain.system import runfolder
from mtrain.system.processes import Requests
from mtrain.system.runfolder import RunFolder

Choose = Callable[[str | None], tuple[str, bool]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with one checkpoint, in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/mine"
    saved(folder, 1)
    return folder


def saved(run: Path, update: int) -> None:
    state = State(weights={"w": np.full(4, update, dtype=np.float32)})
    store = Checkpoints(run / "checkpoints", keep_last=9, keep_best=0, asynchronous=False)
    store.save(state, Progress(update=update), score=None, spec={}, extra={})


def chosen_here(given: str | None) -> tuple[str, bool]:
    """Return the checkpoint of a job on this host alone, and whether its folder is locked then."""
    loaded = config.load("digits", overrides=["report.name=mine"], environ={})
    brief = Brief(loaded=loaded, mode="train", name="mine", resume=given or "auto")
    with hold_place(brief) as where:
        assert where.checkpoint is not None
        return where.checkpoint.name, is_locked(where.run)


def chosen_by_an_agent(given: str | None) -> tuple[str, bool]:
    """Return the checkpoint that the agent of the first host chooses, and whether its folder is locked then."""
    agent = Agent(None, Requests())  # type: ignore[arg-type]
    place = {"given": given, "base": "runs", "name": "mine", "cwd": None, "own_node": 0}
    with agent._resources:
        answer = agent._answer("resume", place)
        assert "error" not in answer, answer
        locked = is_locked(Path(answer["run"]))
        prepared = agent._answer("prepare", {"run_dir": answer["run"], "files": {}, "cwd": None, "node": 0})
        assert "error" not in prepared, "the lock of before is its own"
    return Path(answer["checkpoint"]).name, locked


def is_locked(run: Path) -> bool:
    try:
        runfolder.refuse_running(run)
    except UsageError:
        return True
    return False


WAYS = pytest.mark.parametrize("choose", [chosen_here, chosen_by_an_agent])


@WAYS
@pytest.mark.parametrize("given", [None, "runs/mine"])
def test_what_an_ending_job_saves_before_it_gives_up_the_folder_is_what_the_next_one_goes_on_from(
    run: Path, monkeypatch: pytest.MonkeyPatch, choose: Choose, given: str | None
) -> None:
    look = runfolder.refuse_running

    def last_words(folder: Path) -> None:
        monkeypatch.setattr(runfolder, "refuse_running", look)
        saved(run, 2)
        shutil.rmtree(run / "checkpoints/step-00000001")
        look(folder)

    monkeypatch.setattr(runfolder, "refuse_running", last_words)
    assert choose(given) == ("step-00000002", True)
    assert not is_locked(run), "the job has ended"


@WAYS
def test_a_checkpoint_that_is_named_is_the_one(run: Path, choose: Choose) -> None:
    saved(run, 2)
    assert choose("runs/mine/checkpoints/step-00000001") == ("step-00000001", True)


def test_a_living_run_is_refused_on_several_hosts_before_its_checkpoint_counts(run: Path) -> None:
    agent = Agent(None, Requests())  # type: ignore[arg-type]
    with agent._resources, runfolder.take_folder(RunFolder(run), node=1):
        answer = agent._answer("resume", {"given": None, "base": "runs", "name": "mine", "cwd": None, "own_node": 0})
    assert f"process {os.getpid()} is running a job" in answer["error"]
    assert answer["code"] == 2
