"""`mtrain stacks` shows where the ranks of a running job are: same places on one line, the user's own call first."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.commands.stacks import describe, describe_children, few
from mtrain.system import attempts, stacks
from mtrain.system.attempts import Mark
from mtrain.system.stacks import Frame, Stack
from tests.forks import Fork, fork

__all__ = ["fork"]
pytestmark = pytest.mark.smoke
TORCH = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def barrier() -> None:
    time.sleep(60)


def all_reduce() -> None:
    time.sleep(60)


@pytest.fixture
def start_rank(fork: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Start a rank of the job in ./run."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()

    def start(rank: int, work: Callable[[], None], *, node: int | None = None) -> int:
        def join_and_work() -> None:
            attempts._die_with = lambda mark: None  # type: ignore[assignment] # it would start a thread
            mark = Mark(attempt="a", owner=os.getppid(), owner_ticks=0, node=node)
            attempts.join(mark, Path("run"), rank=rank)
            os.write(telling, b"x")
            work()

        told, telling = os.pipe()
        pid = fork(join_and_work, rank=rank)
        os.read(told, 1)
        deadline = time.monotonic() + 30
        while stacks.ask([pid])[pid].frames[:1] == () or stacks.ask([pid])[pid].frames[0].function != work.__name__:
            assert time.monotonic() < deadline
        return pid

    return start


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return what the command prints, after its exit code."""

    def run(*words: str) -> list[str]:
        code = main(["stacks", *words])
        output = capsys.readouterr()
        return [str(code), *output.out.splitlines(), *output.err.splitlines()]

    return run


def test_ranks_at_the_same_place_are_one_line(start_rank: Callable[..., int], say: Callable[..., list[str]]) -> None:
    for rank, work in enumerate((all_reduce, barrier, all_reduce, all_reduce)):
        start_rank(rank, work)
    code, *lines = say("run")
    assert code == "0"
    assert [line.rpartition("/")[0].partition(":")[0] for line in lines] == ["ranks 0, 2, 3", "rank 1"]
    assert [line.split()[-1] for line in lines] == ["all_reduce", "barrier"]
    assert all(line.split(":")[1].strip() == __file__ for line in lines)


def test_one_rank_is_shown_with_every_call_and_a_stopped_one_as_stopped(
    start_rank: Callable[..., int], say: Callable[..., list[str]]
) -> None:
    start_rank(0, all_reduce)
    pid = start_rank(1, barrier)
    code, head, innermost, *outer = say("run", "--rank", "1")
    assert (code, head) == ("0", "rank 1:")
    assert innermost.endswith(" barrier")
    assert any(line.endswith(" join_and_work") for line in outer)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    assert say("run")[2].startswith("rank 1 (stopped by a signal): ")
    assert say("run", "--rank", "2") == ["2", "error: --rank 2: the ranks of run that run on this host are 0, 1"]


def test_hosts_that_were_not_asked_are_named(start_rank: Callable[..., int], say: Callable[..., list[str]]) -> None:
    start_rank(2, barrier, node=1)
    assert say("run")[2:] == ["not asked: host 0 and others; there: mtrain stacks run"]
    commands = [{"host": name, "argv": []} for name in ("ada", "bob", "cleo")]
    Path("run/plan.json").write_text(json.dumps({"commands": commands}))
    assert say("run")[2:] == ["not asked: ada, cleo; there: mtrain stacks run"]
    Path("run/plan.json").write_text('{"commands": [{"host"')
    assert say("run")[2:] == ["not asked: host 0 and others; there: mtrain stacks run"]


def test_a_run_without_ranks_is_one_error(start_rank: Callable[..., int], say: Callable[..., list[str]]) -> None:
    assert say("nowhere")[0] == "2"
    assert "no such folder" in say("nowhere")[1]
    assert say()[1] == "error: runs/latest: no such folder; give the folder of a run, such as runs/digits"
    assert "no rank of it runs on this host" in say("run")[1]
    Path("run/.ranks-x").write_text("1 1 1\n")
    Path("run/.ranks-0").write_text(f"{os.getpid()} 1 0\nnonsense\n999999999 5 1\n")  # of other processes, and torn
    code, line = say("run")
    assert code == "2"
    assert "no rank of it runs on this host" in line


def test_the_users_own_call_comes_before_that_of_a_library() -> None:
    frames = (
        Frame(TORCH, 9, "all_reduce"),
        Frame("/home/u/train.py", 41, "step"),
        Frame("/home/u/train.py", 60, "main"),
    )
    stopped = Stack("none", why="py-spy is not installed", state="T")
    lines = list(describe({0: Stack("faulthandler", frames), 1: stopped, 2: Stack("py-spy", frames[:1])}))
    assert lines == [
        "rank 0: /home/u/train.py:41 step, in torch/distributed/distributed_c10d.py:9 all_reduce",
        "rank 1 (stopped by a signal): no stack: py-spy is not installed",
        "rank 2: torch/distributed/distributed_c10d.py:9 all_reduce",
    ]


def test_children_of_ranks_at_the_same_place_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrain.system.processes.name_of", lambda pid: "cc1plus")
    reading = Stack("faulthandler", (Frame("/home/u/data.py", 16, "__getitem__"),))
    found = {11: reading, 12: reading, 21: reading, 22: Stack("none", why="w")}
    assert list(describe_children({0: [11, 12], 1: [21, 22]}, found)) == [
        "3 children of ranks 0, 1: /home/u/data.py:16 __getitem__",
        "child 22 of rank 1 (cc1plus): no stack: w",
    ]


def test_rows_of_numbers_are_short() -> None:
    assert few([7, 0, 1, 2, 3, 9, 10]) == "0 to 3, 7, 9, 10"
