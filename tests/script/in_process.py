"""Trainings of the loops of ``scripts/train_several.py`` in this process, as a rank of a job of its own."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import mtrain
from mtrain.core.checkpoint import store
from mtrain.core.checkpoint.format import Saved
from mtrain.rank.process import StopRequest
from mtrain.rank.script.job import RUNNING, RankJob, Running
from mtrain.rank.script.settings import PLAIN
from mtrain.spec import config
from mtrain.system.runfolder import RunFolder
from tests.script.runs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
import train_several

QUIET = ("report.plots=false", "report.tensorboard=false", "train.precision=fp64")


class Killed(Exception):
    """Ends a training as a signal ends a rank: nothing is saved any more."""


@contextmanager
def rank_of(
    folder: Path,
    *overrides: str,
    resume: Path | None = None,
    leave: Callable[[BaseException], None] = lambda error: None,
) -> Iterator[None]:
    """Let ``mtrain.session`` join a job of one rank with these values, in the run folder ``folder``."""
    loaded = config.load(PLAIN, overrides=[*QUIET, *overrides], environ={})
    run, stop = RunFolder(folder), StopRequest()
    run.make()
    job = RankJob(
        resolved=loaded.job,
        run_folder=run,
        resume=resume,
        outside_paths=frozenset(each.partition("=")[0] for each in overrides),
        stop=stop,
        save_requested=stop.save,
        leave=leave,
    )
    before = RUNNING.set(Running(job=job))
    try:
        yield
    finally:
        RUNNING.reset(before)


def length(updates: int) -> dict:
    return {
        "global_batch": train_several.BATCH,
        "updates": updates,
        "order": lambda epoch: range(train_several.SAMPLES),
    }


def trained(folder: Path, loop: str, *overrides: str, updates: int = 10, resume: Path | None = None) -> Saved:
    """Train a loop; return its newest checkpoint."""
    with rank_of(folder, *overrides, resume=resume), suppress(Killed), mtrain.session() as session:
        train_several.LOOPS[loop](session, length(updates))
    return store.load(store.newest(folder / "checkpoints"))


def resumed(folder: Path, loop: str, *overrides: str, monkeypatch: pytest.MonkeyPatch, killed_in: int = 7) -> Saved:
    """Train a loop that is killed in an update, and go on from its newest checkpoint; return the last one."""

    def kill(session: mtrain.Session) -> None:
        if session.progress.update == killed_in:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(train_several, "killed_after", kill)
        trained(folder, loop, *overrides, "checkpoint.every_updates=2")
    newest = store.newest(folder / "checkpoints")
    return trained(folder, loop, *overrides, resume=newest)


def plain_weights(loop: str, updates: int = 10) -> dict[str, np.ndarray]:
    """Return the weights of a loop as a plain script trains them."""
    session = train_several.PlainSession()
    train_several.LOOPS[loop](session, length(updates))
    return session.weights()
