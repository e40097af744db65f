"""The ranks of one host, for starters that are mtrain's own: start them, wait, end all when one fails, and record failures.

A failed rank is one line in the output of the starter, which ``read_deaths`` reads. What the variables of a rank are, and how
ranks meet, is the business of each backend.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

from mtrain.errors import LaunchError

if TYPE_CHECKING:
    from mtrain.system.copied import CopiedProcess

POLL_S = 0.02
"""Pause between two looks at the ranks, in seconds."""
ORPHAN_GRACE_S = 30.0
"""Most seconds that ranks have to save and end when this process's parent, which watched over the job, is gone."""
RECORD = re.compile(r'^rank ended: (\{"rank": \d+, "status": -?\d+\})$', re.MULTILINE)
SHELL_RECORD = """printf 'rank ended: {"rank": %s, "status": %s}\\n' "$RANK" "$status" """
"""The same record, by a shell that has run a rank."""
Process: TypeAlias = "subprocess.Popen[bytes] | CopiedProcess"
"""A rank is a process of its own, or a copy of this one."""
Death = tuple[int, int]
"""A failed rank and its exit status; negative: the signal that ended it."""


def read_deaths(log: str) -> list[Death]:
    """Return the failed ranks that a starter has recorded in its output."""
    return [(each["rank"], each["status"]) for each in map(json.loads, RECORD.findall(log))]


def status_for_shell(status: int) -> int:
    """Return an exit status as a shell reports it: 128 plus the number of the signal that ended the process."""
    return 128 - status if status < 0 else status


def runs_script(command: Sequence[str]) -> bool:
    """Return whether the command of a rank runs a user's script."""
    return ("--mode", "script") in itertools.pairwise(command)


class Ranks:
    """The running ranks of this host.

    Args:
        failure_grace_s: seconds that the other ranks have to end after SIGTERM when one has failed; then they are killed.
        request_grace_s: the same after a request to end; infinite: who has sent it decides.
        saved: exit status of a rank that has saved because it was asked to end, so that the others get ``request_grace_s``.
    """

    def __init__(self, *, failure_grace_s: float, request_grace_s: float, saved: int | None = None) -> None:
        self._failure_grace_s = failure_grace_s
        self._request_grace_s = request_grace_s
        self._saved = saved
        self._processes: dict[int, Process] = {}
        self._parent = os.getppid()
        self._asked_by: int | None = None

    @property
    def end_requested(self) -> bool:
        """Return whether this process got SIGTERM or SIGINT."""
        return self._asked_by is not None

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Record SIGTERM and SIGINT in ``end_requested`` while inside, instead of ending this process."""
        former = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_by = number

    def add(self, rank: int, process: Process) -> None:
        """Add a rank that runs."""
        self._processes[rank] = process

    def start(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start a rank as a process of its own, with ``variables`` besides those of this process.

        Raises:
            LaunchError: the program cannot be executed; the ranks that run already are killed.
        """
        env = {**os.environ, **variables}
        try:
            self.add(rank, subprocess.Popen(list(command), env=env, stdin=subprocess.DEVNULL))  # noqa: S603
        except OSError as error:
            for process in self._running():
                process.kill()
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror or error}") from error

    def wait(self) -> list[Death]:
        """Wait until all ranks have ended; return those that failed first, and record them in the output.

        After a failure or a request to end, the ranks that still run are asked to end: by the signal that this process got, else
        by SIGTERM. Their children are not: a rank needs
        its loader processes to save its state.
        """
        failed: list[Death] = []
        is_asked, kill_at = False, float("inf")
        while True:
            running = self._running()
            failed = failed or self._record_failed()
            if not running:
                return failed
            if failed or self.end_requested or self._is_orphan():
                if not is_asked:
                    is_asked = True
                    for process in running:
                        process.send_signal(self._asked_by or signal.SIGTERM)
                if kill_at == float("inf"):
                    kill_at = time.monotonic() + self._grace_s(failed)
            if time.monotonic() > kill_at:
                for process in running:
                    process.kill()
            time.sleep(POLL_S)

    def _grace_s(self, failed: Sequence[Death]) -> float:
        if failed and status_for_shell(failed[0][1]) != self._saved:
            return self._failure_grace_s
        return min(self._request_grace_s, ORPHAN_GRACE_S if self._is_orphan() else float("inf"))

    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent

    def _record_failed(self) -> list[Death]:
        """Return the ranks that have ended with another status than 0, and print a record of each."""
        statuses = {rank: process.returncode for rank, process in self._processes.items()}
        failed = [(rank, status) for rank, status in statuses.items() if status]
        for rank, status in failed:
            print(f"rank ended: {json.dumps({'rank': rank, 'status': status})}", file=sys.stderr, flush=True)
        return failed

    def _running(self) -> list[Process]:
        return [process for process in self._processes.values() if process.poll() is None]
