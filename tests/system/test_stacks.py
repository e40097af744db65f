"""Stacks of ranks: who can be asked by a signal, who must not be, and that nobody is changed by having been asked."""

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.rank import process
from mtrain.system import stacks
from mtrain.system.proc import read_status
from mtrain.system.runfolder import RunFolder
from mtrain.system.stacks import Frame, Stack
from tests.forks import Fork, fork

__all__ = ["fork"]
pytestmark = [pytest.mark.smoke, pytest.mark.skipif(sys.platform != "linux", reason="/proc and files in memory")]


@pytest.fixture
def no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let py-spy not be installed."""
    monkeypatch.setattr(stacks, "find_reader", lambda: None)


def ask(pid: int) -> Stack:
    return stacks.ask([pid])[pid]


def wait_in_sleep() -> None:
    time.sleep(60)


def compute() -> None:
    number = 0
    while True:
        number += 1


def await_line(pid: int, function: str) -> Stack:
    deadline = time.monotonic() + 30
    while (stack := ask(pid)).frames[:1] == () or stack.frames[0].function != function:
        assert time.monotonic() < deadline, stack
    return stack


@pytest.mark.parametrize("work", [wait_in_sleep, compute])
def test_a_rank_says_where_it_is_as_often_as_it_is_asked(fork: Fork, work: Callable[[], None]) -> None:
    pid = fork(work, rank=3)
    first, second = await_line(pid, work.__name__), ask(pid)
    assert {first.how, second.how} == {"faulthandler"}
    assert second.rank == 3
    assert second.own == second.frames[0]
    assert second.own.file == __file__
    assert second.own.line in range(work.__code__.co_firstlineno, work.__code__.co_firstlineno + 5)
    assert [frame.function for frame in second.frames].count(work.__name__) == 1


def test_a_rank_goes_on_as_if_it_had_not_been_asked(fork: Fork, tmp_path: Path) -> None:
    def sleep_and_write() -> None:
        began = time.monotonic()
        time.sleep(0.3)
        (tmp_path / "slept").write_text(str(time.monotonic() - began))

    pid = fork(sleep_and_write)
    await_line(pid, "sleep_and_write")
    os.waitpid(pid, 0)
    assert float((tmp_path / "slept").read_text()) >= 0.3


def test_a_fork_of_a_rank_answers_for_itself(fork: Fork) -> None:
    told, telling = os.pipe()

    def fork_worker() -> None:
        child = os.fork()
        if child == 0:
            compute()
        os.write(telling, b"%d\n" % child)
        wait_in_sleep()

    pid = fork(fork_worker, rank=2)
    child = int(os.read(told, 100))
    try:
        await_line(pid, "wait_in_sleep")
        assert await_line(child, "compute").rank == 2
        assert [stack.frames[0].function for stack in stacks.ask([pid, child]).values()] == ["wait_in_sleep", "compute"]
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("no_reader")
def test_a_stopped_process_gets_no_signal(fork: Fork) -> None:
    pid = fork(wait_in_sleep)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    stack = ask(pid)
    assert (stack.how, stack.state, stack.rank) == ("none", "T", 0)
    assert "stopped by a signal" in stack.why
    assert "py-spy" in stack.why
    assert not stacks._pending(read_status(pid))
    os.kill(pid, signal.SIGCONT)
    assert await_line(pid, "wait_in_sleep").how == "faulthandler"


def test_a_stopped_process_is_read_from_outside_and_stays_stopped(fork: Fork) -> None:
    if stacks.find_reader() is None:
        pytest.skip("py-spy is not installed")
    pid = fork(wait_in_sleep)
    await_line(pid, "wait_in_sleep")
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    stack = ask(pid)
    if stack.how == "none" and "allowed" in stack.why:
        pytest.skip("this system does not allow it")
    assert (stack.how, stack.state, stack.frames[0].function) == ("py-spy", "T", "wait_in_sleep")
    assert ask(pid).state == "T"


@pytest.mark.usefixtures("no_reader")
@pytest.mark.parametrize("rank", [None, 0], ids=["never registered", "replaced by another program"])
def test_a_process_that_would_die_of_the_signal_gets_none(fork: Fork, rank: int | None) -> None:
    seen, closing = os.pipe()  # the executed program does not inherit it
    pid = fork(wait_in_sleep if rank is None else lambda: os.execvp("sleep", ["sleep", "60"]), rank=rank)
    os.close(closing)
    if rank is not None:
        assert os.read(seen, 1) == b""
    stack = ask(pid)
    assert "mtrain did not take part in its start" in stack.why
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)


@pytest.mark.usefixtures("no_reader")
def test_a_process_that_may_execute_another_program_at_once_gets_no_signal(
    fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "BEGINNING_S", 60.0)
    pid = fork(wait_in_sleep, rank=1)
    assert (ask(pid).rank, ask(pid).why.partition(";")[0]) == (1, "it has just begun")
    monkeypatch.setattr(stacks, "BEGINNING_S", 0.0)
    assert ask(pid).how == "faulthandler"


def test_a_signal_between_its_arrival_and_its_handler_is_waited_for(
    fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = os.kill

    def kill_later(pid: int, number: int) -> None:
        threading.Timer(0.03, kill, (pid, number)).start()

    pid = fork(wait_in_sleep)
    monkeypatch.setattr(os, "kill", kill_later)
    stack = ask(pid)
    monkeypatch.undo()
    assert (stack.how, stack.frames[0].function) == ("faulthandler", "wait_in_sleep")


@pytest.mark.usefixtures("no_reader")
def test_no_stack_gets_into_a_file_that_took_the_number_of_a_closed_one(fork: Fork, tmp_path: Path) -> None:
    told, telling = os.pipe()
    taken = tmp_path / "results"

    def replace_files() -> None:
        os.dup2(telling, 1)
        os.closerange(3, 256)
        for _ in range(50):
            os.open(taken, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(1, b"x")
        wait_in_sleep()

    pid = fork(replace_files)
    os.read(told, 1)
    assert ask(pid).how == "none"
    assert taken.read_text() == ""


@pytest.mark.usefixtures("no_reader")
def test_handlers_of_a_script_stay_as_they_are(fork: Fork) -> None:
    told, telling = os.pipe()

    def take_first() -> None:
        signal.signal(stacks.SIGNAL, lambda *_: os.write(telling, b"mine"))
        stacks.register(0)
        os.kill(os.getpid(), stacks.SIGNAL)
        wait_in_sleep()

    pid = fork(take_first, rank=None)
    assert os.read(told, 10) == b"mine"
    assert ask(pid).how == "none"

    def take_later() -> None:
        signal.signal(stacks.SIGNAL, lambda *_: os.write(telling, b"mine"))
        os.write(telling, b"ready")
        wait_in_sleep()

    pid = fork(take_later)
    assert os.read(told, 10) == b"ready"
    assert ask(pid).why.startswith("it has written no stack")
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)


@pytest.mark.usefixtures("no_reader")
def test_a_process_that_blocks_the_signal_gets_none(fork: Fork) -> None:
    told, telling = os.pipe()

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {stacks.SIGNAL})
        os.write(telling, b"x")
        wait_in_sleep()

    pid = fork(block)
    os.read(told, 1)
    stack = ask(pid)
    assert "does not handle the signal" in stack.why


@pytest.mark.usefixtures("no_reader")
def test_whoever_asks_while_another_does_is_told_so(fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", 0.05)
    pid = fork(wait_in_sleep)
    with stacks._open_dump(pid) as (rank, descriptor):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert rank == 0
        assert ask(pid).why.startswith("another process is asking it")
    assert ask(pid).how == "faulthandler"


def test_one_that_does_not_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(3)
    monkeypatch.setattr(stacks, "_ask", lambda pid: barrier.wait(timeout=60) * 0 or Stack("none", why=str(pid)))
    assert {pid: stack.why for pid, stack in stacks.ask([7, 8, 9]).items()} == {7: "7", 8: "8", 9: "9"}
    assert stacks.ask([]) == {}


def test_an_ended_process_has_no_stack(fork: Fork) -> None:
    pid = fork(lambda: None)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ask(pid) == Stack("none", why="it has ended")
    os.waitpid(pid, 0)
    assert ask(pid) == Stack("none", why="it has ended")


def test_every_rank_answers_from_its_start(fork: Fork, tmp_path: Path) -> None:
    def run() -> None:
        process.run(lambda stop, leave: compute(), run_folder=RunFolder(tmp_path), environ={"HOROVOD_RANK": "5"})

    pid = fork(run, rank=None)
    deadline = time.monotonic() + 30
    while (stack := ask(pid)).rank is None or stack.frames[0].function != "compute":
        assert time.monotonic() < deadline, stack
    assert stack.rank == 5


@pytest.mark.parametrize(
    ("written", "frames"),
    [
        (b"", ()),
        (b"Stack (most recent call fi", ()),
        (
            b'Stack (most recent call first):\n  File "/a/b.py", line 7 in f\n  File "/a/c.py", li',
            (Frame("/a/b.py", 7, "f"),),
        ),
        (
            b'  File "o.py", line 1 in o\nStack (most recent call first):\n  File "/a b\\xfc/\\u4e2d\\U0001f600", line ??? in f\n  ...\n',
            (Frame("/a b\xfc/\u4e2d\U0001f600", 0, "f"),),
        ),
        (b'Stack (most recent call first):\n  File "\\Uffffffff", line 2 in \xff\xfe\n', (Frame(chr(0x10FFFF), 2, "\ufffd\ufffd"),)),
    ],
)  # fmt: skip
def test_a_torn_or_foreign_stack_is_read_as_far_as_it_is_one(written: bytes, frames: tuple[Frame, ...]) -> None:
    assert stacks.parse_dump(written) == frames


def test_an_endless_stack_is_read_up_to_a_bound(fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_BYTES", 3 * (len(__file__) + 60))

    def deepen(calls: int) -> None:
        deepen(calls - 1) if calls else wait_in_sleep()

    pid = fork(lambda: deepen(60))
    assert len(await_line(pid, "wait_in_sleep").frames) in (2, 3)
    assert len(ask(pid).frames) in (2, 3)  # what was written before is gone


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/u/train.py", True),
        ("train.py", True),
        ("<frozen runpy>", False),
        ("<string>", False),
        ("/v/lib/python3.12/site-packages/torch/x.py", False),
        ("/usr/lib/python3/dist-packages/numpy/x.py", False),
        (time.__spec__.origin if time.__spec__.origin != "built-in" else os.__file__, False),
        (process.__file__, False),
        ("/clone/packages/mtrain-trace/src/mtrain_trace/patching.py", False),
    ],
)
def test_the_users_own_line_is_in_no_package(file: str, is_own: bool) -> None:
    stack = Stack("py-spy", (Frame(process.__file__, 1, "all_reduce"), Frame(file, 2, "f")))
    assert (stack.own is not None) is is_own
