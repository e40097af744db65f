"""A process that has imported the programs of a job ahead, and runs each job that is asked for in a copy of itself.

For jobs of one spec that are short, such as the trials of a sweep: importing a framework takes longer than their updates. A
copy leads a job as its command does, and the job's command on this host, a rank or a starter of ranks, is a copy of that one.

``python -m mtrain.system.warm DESCRIPTOR PADDING`` reads lines of JSON from a socket: first an ``Ahead``, then ``{"start":
{...}}`` and ``{"signal": [pid, number]}``. It answers ``{"ready": bool}``, ``{"started": pid}`` or ``{"refused": why}``, and
``{"ended": [pid, status]}``.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from mtrain.spec import collector
from mtrain.system import copied
from mtrain.system.copied import CopiedProcess, Copy

POLL_S = 0.05
FIRST_S = 60.0
"""Seconds in which the other end must have said what is to be imported."""
PADDING = 4096
"""Bytes that the command line of a warm process has room for, in which copies show theirs."""
OWN_VARIABLES = (
    *("MTRAIN_JOB_ATTEMPT", "MTRAIN_JOB_SECRET", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),  # read where a process group is made
    "LD_LIBRARY_PATH",  # OpenCV adds its folder each time it is imported; the loader has read it when the process began
)
"""Variables that may differ from job to job, because nothing reads them while it is imported."""

Program = Callable[[Sequence[str]], int]


class Messages:
    """Objects as lines of JSON over a socket; knows whether one has arrived, which the buffer of a file would hide."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self.is_closed = False
        """Whether the other end is closed."""

    def say(self, message: Mapping[str, Any]) -> None:
        """Send an object.

        Raises:
            OSError: The connection is lost.
        """
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def arrives(self, timeout_s: float) -> bool:
        """Return whether an object arrives in time; False once the other end is closed."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received and not self.is_closed:
            if not select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            try:
                received = self._connection.recv(1 << 16)
            except OSError:
                received = b""
            self._received += received
            self.is_closed = not received
        return b"\n" in self._received

    def hear(self) -> Mapping[str, Any]:
        """Return the object that has arrived, see ``arrives``."""
        line, _, self._received = self._received.partition(b"\n")
        message: Mapping[str, Any] = json.loads(line)
        return message


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """What a warm process imports before the first job."""

    copier: str
    """Module whose ``program(name, words)`` imports the program of a rank, and returns None where it must not be copied."""
    rank: str
    """Module of that program."""
    rank_words: Sequence[str]
    programs: Sequence[str]
    """Further modules with a function ``main`` that jobs run."""
    parts: Sequence[str]
    """Further modules that they import."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Warm:
    """What this process, or the one that it is a copy of, has imported ahead."""

    programs: Mapping[str, Program]
    environ: Mapping[str, str]
    """The variables that it was started with, some of which libraries read while they are imported."""
    files: frozenset[int] = field(default_factory=frozenset)
    """Descriptors that libraries have opened."""


_warm: list[_Warm] = []
"""Set once in a warm process, and so in its copies; empty in all others. What is imported is a state of the process too."""


def start(argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> CopiedProcess | None:
    """Start a command as a copy of this process, as ``processes.start`` would start it.

    Returns:
        The process; None if the command has to be started otherwise: this process is not warm, has other threads or variables
        that libraries have read already, or the command is another program.

    Raises:
        OSError: see ``copied.start``.
    """
    words = [word for word in argv if word != "-u"]
    if not _warm or words[:2] != [sys.executable, "-m"] or len(words) < 3 or words[2] not in _warm[0].programs:
        return None
    is_read = {**_warm[0].environ, **env}.keys() - {*OWN_VARIABLES}
    if any(env.get(name) != _warm[0].environ.get(name) for name in is_read) or threading.active_count() > 1:
        return None
    return _copy(words, env=env, log=log)


def _copy(words: Sequence[str], *, env: Mapping[str, str], log: Path) -> CopiedProcess | None:
    program, line = _warm[0].programs[words[2]], [words[0], "-u", *words[1:]]
    if not copied.can_be_shown(line):
        return None
    arguments = list(words[3:])
    return copied.start(
        Copy(words=line, run=lambda: program(arguments), environ=env, log=log, kept_files=_warm[0].files)
    )


def main(argv: Sequence[str]) -> int:
    """Serve the socket whose descriptor is the first argument until its other end is closed."""
    descriptor = int(argv[0])
    with socket.socket(fileno=descriptor) as connection:
        messages = Messages(connection)
        if messages.arrives(FIRST_S):
            is_ready = _import(Ahead(**messages.hear()), without=descriptor)
            messages.say({"ready": is_ready})
            if is_ready:
                _serve(messages)
    return 0


def _import(ahead: Ahead, *, without: int) -> bool:
    environ, before = dict(os.environ), _open_files()
    with collector.pause():
        rank = import_module(ahead.copier).program(ahead.rank, list(ahead.rank_words))
        if rank is None:
            return False
        programs = {ahead.rank: rank.main}
        programs |= {name.removesuffix(".__main__"): import_module(name).main for name in ahead.programs}
        for part in ahead.parts:
            import_module(part)
    collector.keep_all()
    own = _open_files() - before - {without}
    _warm.append(_Warm(programs=programs, environ=environ, files=own))
    return threading.active_count() == 1


def _open_files() -> frozenset[int]:
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    return frozenset(number for number in listed if os.path.exists(f"/proc/self/fd/{number}"))


def _serve(messages: Messages) -> None:
    running: dict[int, CopiedProcess] = {}
    while not messages.is_closed:  # copies get SIGTERM when this process ends, and save
        if messages.arrives(POLL_S):
            message = messages.hear()
            if "signal" in message:
                pid, number = message["signal"]
                if pid in running:
                    running[pid].send_signal(signal.Signals(number))
            else:
                process, answer = _start(message["start"])
                running |= {} if process is None else {process.pid: process}
                messages.say(answer)
        for pid, process in list(running.items()):
            if (status := process.poll()) is not None:
                messages.say({"ended": [pid, status]})
                del running[pid]


def _start(order: Mapping[str, Any]) -> tuple[CopiedProcess | None, Mapping[str, Any]]:
    try:
        process = _copy(order["words"], env=order["env"], log=Path(order["log"]))
    except OSError as error:
        return None, {"refused": error.strerror or str(error)}
    return process, {"refused": "its command line is too long"} if process is None else {"started": process.pid}


if __name__ == "__main__":
    # Copies find what this process has imported in the module of this name, and not in ``__main__``.
    sys.exit(import_module("mtrain.system.warm").main(sys.argv[1:]))
