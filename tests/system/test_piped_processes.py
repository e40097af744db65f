"""Commands that are connected by pipes are asked to end when this process dies, whatever asks for that, and SIGUSR1 ends none."""

import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mtrain.system import processes
from tests.starts import starts_processes

pytestmark = [pytest.mark.job, pytest.mark.smoke]

LIVES = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
TELLS = """
import os, signal
kept = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(kept, signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, os.getsid(0) == os.getpid())
"""
STARTS = """
import os, sys
from mtrain.system import processes
if sys.argv[1] == "without":
    processes._asking_for_signal = lambda: None
child = processes.start_piped([sys.executable, "-c", sys.argv[2]], env=os.environ)
print(int(child.stdout.readline()), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


@pytest.fixture(params=["with", "without"])
@starts_processes
def way(request, monkeypatch) -> str:
    """Whether a program of the system asks for the signal."""
    if request.param == "without":
        monkeypatch.setattr(processes, "_asking_for_signal", lambda: None)
    elif processes._asking_for_signal() is None:
        pytest.skip("setpriv is not installed")
    return request.param


def test_a_command_ends_when_the_process_that_started_it_is_killed(way):
    line = [sys.executable, "-c", STARTS, way, LIVES]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        descriptor = os.pidfd_open(int(started.stdout.readline()))
        started.communicate("die now that the command can be watched")
        assert started.returncode == -signal.SIGKILL
    try:
        assert select.select([descriptor], [], [], 60.0)[0], "it still runs"
    finally:
        os.close(descriptor)


def test_a_command_takes_no_notice_of_a_request_to_save_and_has_a_session_of_its_own(way):
    before = signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with processes.start_piped([sys.executable, "-c", TELLS], env=os.environ) as process:
        assert process.stdout.read() == b"True True True\n"
    assert (signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before


def test_a_program_that_is_not_there_is_an_error_of_the_system(way):
    with pytest.raises(FileNotFoundError):
        processes.start_piped(["no-such-program"], env=os.environ)


def test_no_function_runs_before_a_command_for_which_the_memory_of_this_process_would_be_copied(monkeypatch):
    if processes._asking_for_signal() is None:
        pytest.skip("setpriv is not installed")
    asked = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda argv, **named: asked.append(named))
    processes.start_piped([sys.executable, "-c", ""], env=os.environ)
    assert [named.get("preexec_fn") for named in asked] == [None]


def test_a_thread_may_start_a_command_too(way):
    with ThreadPoolExecutor(1) as thread:
        process = thread.submit(processes.start_piped, [sys.executable, "-c", TELLS], env=os.environ).result()
        with process:
            assert process.stdout.read() == b"True True True\n"
