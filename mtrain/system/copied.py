"""Processes that are copies (forks) of this one and run a program that it has imported.

A copy behaves as a process of its own that was started with the program's command line: its own session, log, environment,
signals and open files.
"""

import atexit
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from mtrain.spec import outputs
from mtrain.system import processes
from mtrain.system.ending import end_with

PASSED_ON = (signal.SIGTERM, signal.SIGINT)
"""Signals that a starter handles, and a copy of it not before it says so."""
POLL_S = 0.02


class CopiedProcess:
    """A copy of this process; has the part of ``subprocess.Popen`` that starters and watchers need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        """Return the exit status once the process has ended."""
        while (status := self.poll()) is None:
            time.sleep(POLL_S)
        return status

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        # Until waitpid has taken the status, the number belongs to this process and to no other one.
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """What a copy runs, and what it has in place of what this process has."""

    words: Sequence[str]
    """The command line that it shows, and whose last words are the program's arguments."""
    run: Callable[[], int]
    environ: Mapping[str, str]
    log: Path
    kept_files: frozenset[int] = field(default_factory=frozenset)
    """Descriptors that stay open in it, besides those of input, output and errors."""


def start(copy: Copy) -> CopiedProcess:
    """Start a copy as ``processes.start`` starts a command.

    This process must have one thread, because locks that others hold would be held in the copy for ever.

    Raises:
        OSError: The log cannot be written, or the system has no room for another process.
    """
    copy.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    prepare = processes.preparation()
    sys.stdout.flush()
    sys.stderr.flush()
    with outputs.open_to_write(copy.log, "ab") as output:
        # A signal that came in between would be handled by the copy as if it were this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            pid = os.fork()
            if pid == 0:
                _live(copy, output.fileno(), prepare)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    return CopiedProcess(pid)


def _live(copy: Copy, log: int, prepare: Callable[[], None]) -> NoReturn:
    """Be the copy. Nothing leaves this function, or the code that has called ``start`` would run twice."""
    try:
        os.setsid()
        for number in PASSED_ON:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        prepare()
        os.dup2(log, 1)
        os.dup2(log, 2)
        _leave_files(copy.kept_files)
        atexit._clear()  # what this process is to do at its end is not the copy's business
        os.environ.clear()
        become(copy.words, copy.environ)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        _end(copy.run)
    finally:
        os._exit(70)


def _end(run: Callable[[], int]) -> None:
    status = 1
    try:
        end_with(run)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()  # after status 0 the process is gone with this
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave_files(kept: frozenset[int]) -> None:
    """Give up the files that the other process has open, whose locks would be held as long as this one lives.

    Their numbers stay taken: objects of the other process would close a new file with such a number when they are freed.
    """
    empty = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number not in kept and number not in (1, 2, empty):
            with suppress(OSError):  # the descriptor that listed this folder
                os.fstat(number)
                os.dup2(empty, number, inheritable=number == 0)


def become(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Take over a command line and variables, and what a new process has: output without buffer, a numpy generator of its own.

    Args:
        words: ``[interpreter, ..., "-m", module, *arguments]``.
        environ: Variables that are added.
    """
    os.environ.update(environ)
    at = list(words).index("-m") + 1
    module = sys.modules.get(words[at])
    sys.argv = [str(getattr(module, "__file__", None) or words[at]), *words[at + 1 :]]
    sys.stdout = io.TextIOWrapper(
        os.fdopen(1, "wb", 0, closefd=False),
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        write_through=True,
    )
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    with suppress(OSError, IndexError, ValueError):
        show_as(words)


def show_as(words: Sequence[str]) -> None:
    """Show ``words`` as the command line of this process, in ``ps`` and to programs that look for ranks.

    Raises:
        OSError: The kernel does not allow it.
        ValueError: They are longer than the command line with which the process was started.
    """
    _write_line(b"".join(os.fsencode(word) + b"\0" for word in words))


def can_be_shown(words: Sequence[str] | None = None) -> bool:
    """Return whether the kernel lets this process write its command line; hardened ones do not. None: the one that it has."""
    try:
        if words is None:
            _write_line(Path("/proc/self/cmdline").read_bytes())
        else:
            return sum(len(os.fsencode(word)) + 1 for word in words) <= _room()[1]
    except (OSError, IndexError, ValueError):
        return False
    return True


def _room() -> tuple[int, int]:
    """Return where the command line of this process is in its memory, and how many bytes it has."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    return first, end - first


def _write_line(line: bytes) -> None:
    first, size = _room()
    if len(line) > size:
        raise ValueError(f"{len(line)} bytes given; expected at most {size}")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(first)
        memory.write(line.ljust(size, b"\0"))
