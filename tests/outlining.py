"""Outlines of models by one process for all tests of a worker, which answers each question in a copy of itself.

`mtrain.weights.outline` starts a process for every question, because a process can bind `core.nn` only once. Tests that
only need an answer get it from here; those of the process itself call `cold`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.weights import outline
from tests import starts

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMAND = [sys.executable, "-m", "mtrain.weights.outline"]
"""That this process stands in for."""


class Outliner:
    """The process, started with the first question."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: list[str], *, input: str, **how: Any) -> "subprocess.CompletedProcess[str]":
        """Answer as `subprocess.run` of that command would, in the folder and with the variables of this process."""
        assert command == COMMAND, command
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        here = {"questions": input, "cwd": os.getcwd(), "environ": dict(os.environ)}
        process.stdin.write(json.dumps(here) + "\n")
        process.stdin.flush()
        status, output = json.loads(process.stdout.readline())
        if status:
            raise subprocess.CalledProcessError(status, command, output)
        return subprocess.CompletedProcess(command, status, output, "")

    def _start(self) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-m", "tests.outlining"]
        with starts.allowed():
            return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.communicate()
            self._process = None


OUTLINER = Outliner()


@pytest.fixture(autouse=True, scope="session")
def outlines_come_from_one_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(**{**vars(subprocess), "run": OUTLINER.run})
        patch.setattr(outline, "subprocess", stand_in)
        yield
        OUTLINER.close()


@contextmanager
def cold() -> Iterator[None]:
    """Have each outline start its process, as outside of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outline, "subprocess", subprocess)
        yield


def _answer(here: Any) -> None:
    """Be the process of one question: print the answers to standard output."""
    os.chdir(here["cwd"])
    os.environ.clear()
    os.environ.update(here["environ"])
    sys.path[0] = here["cwd"]
    import io

    sys.stdin = io.StringIO(here["questions"])
    outline.main()
    sys.stdout.flush()


def main() -> None:
    """Answer each line of standard input by a line: the exit status, and what was printed."""
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(writing, 1)
                os.close(reading)
                _answer(json.loads(line))
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            output = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([status, output]), flush=True)


if __name__ == "__main__":
    main()
