"""Forks of the test's process in the place of ranks, which start in a millisecond."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from mtrain.system import stacks
from tests.starts import starts_processes

Fork = Callable[..., int]


@pytest.fixture
@starts_processes
def fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fork]:
    """Run a function in a fork of this process, registered as a rank; return its id once the function has begun."""
    monkeypatch.setattr(stacks, "BEGINNING_S", 0.0)
    pids = []

    def start(work: Callable[[], object], *, rank: int | None = 0) -> int:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                if rank is not None:
                    stacks.register(rank)
                os.write(writing, b"x")
                work()
            os._exit(0)
        pids.append(pid)
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        return pid

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
