"""Trials that are copies of one warm process: the same results as trials that are processes of their own, and no imports."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from tests.sweeping.jobs import TINY, sweep_request

import mtrain
from mtrain.system import warm
from mtrain.system.warm import Ahead
from mtrain_sweep import search as sweep
from mtrain_sweep import sharing, starting
from tests.starts import starts_processes

COUNTER = """
import os, sys
if "mtrain.weights.outline" not in sys.orig_argv:  # asked for the size of checkpoints where the disk is nearly full
    with open(os.environ["STARTED_LOG"], "a") as file:
        print(os.getpid(), file=file)
"""
PROGRAM = """
import os, signal, sys, time

def program(name, words):
    return sys.modules[__name__] if words == ["fine"] else None

def main(words):
    print(words, sys.argv[1:], os.environ.get("LETTER"), os.getppid(), flush=True)
    if words == ["wait"]:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
        time.sleep(60)
    if words == ["fail"]:
        raise ValueError("a trial that fails")
    return 3
"""


def settled(folder: Path, **settings: object) -> sweep.SweepPlan:
    short = {**TINY, "train": {"epochs": None, "updates": 6}, "evaluate": {"every_epochs": None, "every_updates": 3}}
    request = sweep_request(folder, load=lambda: mtrain.load_spec(short), trials=2, sampler="random", **settings)
    return starting.prepare(request)


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trials_that_are_copies_have_the_bits_of_trials_that_are_not(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNTER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setitem(TINY, "backend", {"name": "solo" if ranks == 1 else "ddp"})
    monkeypatch.setitem(TINY, "cluster", {"nproc_per_node": ranks, "threads": 1})
    started = {}
    for name, shares in (("shared", True), ("alone", False)):
        monkeypatch.setenv("STARTED_LOG", str(tmp_path / name / "started.txt"))
        plan = settled(tmp_path / name, shares=shares)
        assert sweep.run(plan).code == 0
        started[name] = len((tmp_path / name / "started.txt").read_text().split())
    # Alone, each of two trials starts its command and its rank, or a starter of ranks.
    assert started == {"shared": 1, "alone": 4}, (tmp_path / "shared/logs/warm.log").read_text()
    for number in ("0000", "0001"):
        shared, alone = (
            json.loads((tmp_path / name / "trials" / number / "summary.json").read_text())
            for name in ("shared", "alone")
        )
        assert shared["weights_sha256"] == alone["weights_sha256"]
        assert shared["last"] == alone["last"]
    tables = [(tmp_path / name / "trials.csv").read_bytes() for name in ("shared", "alone")]
    assert tables[0] == tables[1]


@pytest.fixture
@starts_processes
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sharing.Copies:
    (tmp_path / "some_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    made = made_copies(tmp_path, "fine")
    assert made.is_ready
    return made


def made_copies(folder: Path, word: str) -> sharing.Copies:
    ahead = Ahead(copier="some_program", rank="some_program", rank_words=[word], programs=[], parts=[])
    return sharing.Copies(ahead, env=dict(os.environ), log=folder / "warm.log")


def status_of(copies: sharing.Copies, pid: int) -> int:
    deadline = time.monotonic() + 60
    while (status := copies.status(pid)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return status


@pytest.mark.smoke
def test_a_copy_has_its_own_words_variables_and_log(copies: sharing.Copies, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "some_program"]
    pids = [copies.start([*words, word], env={"LETTER": word}, log=tmp_path / f"{word}.log") for word in ("a", "b")]
    assert [status_of(copies, pid) for pid in pids if pid] == [3, 3]
    for word in ("a", "b"):
        assert (tmp_path / f"{word}.log").read_text().startswith(f"['{word}'] ['{word}'] {word} ")
    failing = copies.start([*words, "fail"], env={}, log=tmp_path / "fail.log")
    assert failing
    assert status_of(copies, failing) == 1
    assert "ValueError: a trial that fails" in (tmp_path / "fail.log").read_text()
    copies.close()


@pytest.mark.smoke
def test_a_signal_reaches_a_copy_and_the_death_of_the_warm_process_ends_it(
    copies: sharing.Copies, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "some_program", "wait"]
    asked, left = (copies.start(words, env={}, log=tmp_path / f"{name}.log") for name in ("asked", "left"))
    assert asked
    assert left
    for name in ("asked", "left"):
        while "wait" not in (tmp_path / f"{name}.log").read_text():
            time.sleep(0.02)
    time.sleep(0.2)
    copies.send(asked, signal.SIGTERM)
    assert status_of(copies, asked) == 5
    assert copies.status(left) is None
    os.kill(int((tmp_path / "left.log").read_text().split()[-1]), signal.SIGKILL)
    assert status_of(copies, left) == sharing.LOST
    assert not copies.is_ready
    deadline = time.monotonic() + 60
    while Path(f"/proc/{left}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{left}").exists()
    copies.close()


@pytest.mark.job
def test_where_ranks_must_not_be_copied_no_trial_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    refused = made_copies(tmp_path, "not")
    assert not refused.is_ready
    refused.close()


@pytest.mark.parametrize("name", ["backend.options.device", "cluster.threads"])
def test_what_decides_a_process_is_searched_with_processes_of_their_own(name: str, tmp_path: Path) -> None:
    choices = ["cpu", "auto"] if name.startswith("backend") else [1, 2]
    plan = settled(tmp_path / "s", space={name: {"choices": choices}})
    assert sharing.copies_for(plan.definition, plan.folder, variables=lambda: dict(os.environ)) is None


def test_a_rank_with_other_variables_than_those_that_libraries_have_read_is_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = warm._Warm(programs={"m": lambda words: 0}, environ={"OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(warm, "_warm", [ready])
    monkeypatch.setattr(warm, "_copy", lambda words, *, env, log: "copied")
    # Tests before this one may have left threads in this process.
    monkeypatch.setattr(warm.threading, "active_count", lambda: 1)
    argv = [sys.executable, "-u", "-m", "m", "x"]
    attempt = {"OMP_NUM_THREADS": "1", "MTRAIN_JOB_ATTEMPT": "a:1:2:"}
    assert warm.start(argv, env=attempt, log=tmp_path / "log") == "copied"
    assert warm.start(argv, env={**attempt, "OMP_NUM_THREADS": "2"}, log=tmp_path / "log") is None
    assert warm.start(argv, env={**attempt, "MKL_CBWR": "COMPATIBLE"}, log=tmp_path / "log") is None
    assert warm.start([sys.executable, "-m", "n"], env=attempt, log=tmp_path / "log") is None


def test_two_messages_that_arrive_at_once_are_both_heard() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b'{"started": 1}\n{"ended": [1, 0]}\n{"st')
        messages = warm.Messages(other)
        heard = []
        while messages.arrives(0.0):
            heard.append(messages.hear())
        assert heard == [{"started": 1}, {"ended": [1, 0]}]
        one.sendall(b'arted": 2}\n')
        one.shutdown(socket.SHUT_WR)
        assert messages.arrives(5.0)
        assert messages.hear() == {"started": 2}
        assert not messages.arrives(5.0)
        assert messages.is_closed
