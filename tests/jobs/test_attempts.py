"""Ranks belong to one attempt of a job: their failures count for no other, and none outlives its attempt."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mtrain.errors import UsageError
from mtrain.jobs.run.host_command import HostCommand, Orders
from mtrain.system import attempts
from mtrain.system.failures import read_failures, write_failure
from mtrain.system.runfolder import RunFolder

pytestmark = [pytest.mark.job, pytest.mark.smoke]

RANKS = Path(__file__).parents[1] / "launchers" / "ranks.py"


def until(condition, timeout_s: float = 60.0):
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return result


def orders(behaviour: str, run_dir: Path) -> Orders:
    return Orders(
        host="127.0.0.1",
        argv=[sys.executable, str(RANKS), behaviour, "--run-dir", str(run_dir)],
        env={"RANK": "1"},
        forwarded={},
        starts_ranks=False,
        first_rank=1,
        ranks=1,
        silence_s=60.0,
        failure_s=60.0,
    )


@pytest.fixture
def rank(tmp_path):
    """Starts a rank that ends for no request, as that of an attempt which this process has begun."""
    started: list[subprocess.Popen] = []

    def start(node: int | None, *, owner: attempts.Mark | None = None) -> subprocess.Popen:
        mark = owner or attempts.draw_mark(node)
        argv = [sys.executable, str(RANKS), "ignore_requests", "--run-dir", str(tmp_path)]
        started.append(subprocess.Popen(argv, env={**os.environ, "RANK": "1", **mark.variables()}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_rank_of_an_earlier_attempt_that_fails_late_is_no_failure_of_this_one(tmp_path):
    run = RunFolder(tmp_path, node=1)
    run.make()
    write_failure(run, 1, RuntimeError("before"), attempt="earlier")
    command = HostCommand(orders("ignore_requests", tmp_path), run, environ=dict(os.environ), leftover_s=0.0)
    try:
        until((tmp_path / "ready-1").exists)
        write_failure(run, 1, RuntimeError("connection closed by peer"), attempt="earlier")
        assert [event for event in command.events() if event["event"] == "failure"] == []
    finally:
        command.close()
    assert [failure["error"] for failure in read_failures(run)] == ["RuntimeError: connection closed by peer"]


def test_a_failure_names_its_attempt_and_process(tmp_path):
    run = RunFolder(tmp_path, node=1)
    run.make()
    command = HostCommand(orders("rank_1_raises_and_0_hangs", tmp_path), run, environ=dict(os.environ), leftover_s=0.0)
    pid = command._process.pid
    events = []
    until(lambda: events.extend(command.events()) or any(event["event"] == "ended" for event in events))
    (failure,) = [event["failure"] for event in events if event["event"] == "failure"]
    assert failure["error"] == "ValueError: the seventh image is upside down"
    assert (failure["pid"], failure["host"]) == (pid, os.uname().nodename)
    assert len(failure["attempt"]) == 16


def test_ranks_of_several_hosts_die_with_their_agent_whatever_starters_are_between(tmp_path):
    """The shell between them neither passes a signal on nor ends its child; the rank hears no request to end."""
    script = (
        "import os, subprocess, sys, time\n"
        "from mtrain.system import attempts\n"
        "env = {**os.environ, 'RANK': '1', **attempts.draw_mark(1).variables()}\n"
        "subprocess.Popen(['sh', '-c', 'trap : TERM; \"$@\" & wait; wait', 'sh', *sys.argv[1:]], env=env)\n"
        "time.sleep(600)\n"
    )
    argv = [sys.executable, str(RANKS), "ignore_requests", "--run-dir", str(tmp_path)]
    agent = subprocess.Popen([sys.executable, "-c", script, *argv])
    try:
        until((tmp_path / "ready-1").exists)
        everybody = psutil.Process(agent.pid).children(recursive=True)
        (actual,) = [process for process in everybody if process.cmdline()[1:3] == argv[1:3]]
        agent.kill()
        agent.wait()
        until(lambda: not actual.is_running() or actual.status() == psutil.STATUS_ZOMBIE)
    finally:
        agent.kill()
        for process in everybody:
            if process.is_running():
                process.kill()
    assert read_failures(RunFolder(tmp_path)) == []


def test_a_rank_whose_agent_has_died_before_does_not_begin(tmp_path, rank):
    """Another process may have the agent's id by then."""
    mark = attempts.draw_mark(1)
    late = rank(1, owner=attempts.Mark(attempt="a", owner=mark.owner, owner_ticks=mark.owner_ticks + 1, node=1))
    assert late.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "ready-1").exists()


def test_an_attempt_of_several_hosts_begins_when_no_earlier_rank_is_left(tmp_path, rank):
    former = rank(1)
    until((tmp_path / "ready-1").exists)
    attempts.await_former_ranks(tmp_path, 1)
    assert former.wait(60) == -signal.SIGKILL
    attempts.await_former_ranks(tmp_path, 1, timeout_s=0.0)


def test_on_one_host_ranks_of_an_earlier_attempt_may_save_and_are_named_if_they_do_not_end(tmp_path, rank):
    former = rank(None)
    until((tmp_path / "ready-1").exists)
    with pytest.raises(UsageError, match=rf"kill -9 {former.pid}$"):
        attempts.await_former_ranks(tmp_path, None, timeout_s=0.1)
    assert former.poll() is None
    former.kill()
    former.wait()
    attempts.await_former_ranks(tmp_path, None)


def test_ranks_of_another_host_that_shares_the_folder_are_not_awaited(tmp_path, rank):
    rank(2)
    until((tmp_path / "ready-1").exists)
    attempts.await_former_ranks(tmp_path, 1, timeout_s=0.0)
