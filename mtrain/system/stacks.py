"""Where ranks are in their code: a rank writes the stack of its main thread when it gets a signal, and ``ask`` reads it.

The stack is written by ``faulthandler``, which needs neither the interpreter's lock nor memory, into a file in memory that the
rank and its forks share, so no disk and no network can block it. Where a process cannot write its own, because it is stopped or
mtrain did not take part in its start, ``py-spy`` reads it from outside, if it is installed.
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtrain.system.proc import BEGAN, read_stat, read_status

SIGNAL = int(getattr(signal, "SIGRTMIN", 34)) + 6
"""The signal at which a rank writes its stack. None of the frameworks uses it."""
_BIT = 1 << (SIGNAL - 1)
"""Its place in the masks of /proc/PID/status."""
_NAME = "mtrain-stack-of-rank-"
ANSWER_S = 3.0
"""Seconds in which a process must have written its stack: 0.02 as a rule, more than 1 with fifteen busy processes for each core."""
QUIET_S = 0.25
"""How long a process that has neither the signal nor its handler before it may still begin to write."""
READER_S = 10.0
"""Seconds that py-spy may take. Measured under load: 0.07 as a rule, 3.2 at most."""
MOST_AT_ONCE = 16
"""Processes that are asked at the same time: one that does not answer holds up no other."""
POLL_S = 0.005
BEGINNING_S = 1.0
"""Seconds in which a new process gets no signal: one that is about to execute another program would die of it."""
MAX_BYTES = 256 * 1024
"""How much of a stack is read. faulthandler ends after 100 frames."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_NO_SIGNAL = {
    "T": "it is stopped by a signal",
    "t": "a debugger has stopped it",
    "Z": "it has ended",
    "X": "it has ended",
}
"""States of the kernel in which a process answers no signal, in words."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call in a stack."""

    file: str
    line: int
    """0 where it is unknown."""
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a process's main thread."""

    how: Literal["faulthandler", "py-spy", "none"]
    """Who has read it."""
    frames: tuple[Frame, ...] = ()
    """The calls, the innermost first."""
    why: str = ""
    """Why there is none."""
    state: str = ""
    """The kernel's letter for the state of the process: R, S, D, T ...; empty: it has ended."""
    rank: int | None = None
    """The rank that the process is or was forked from; None: mtrain did not take part in its start."""

    @property
    def own(self) -> Frame | None:
        """The innermost call in code that is neither Python's, nor an installed package's, nor mtrain's; None: there is none."""
        return next((frame for frame in self.frames if _is_own(frame.file)), None)


class _Unread(Exception):
    """A stack could not be read; the message says why."""


def register(rank: int) -> None:
    """Have this process, and those that it forks, write the stack of their main thread at each ``SIGNAL``.

    Nothing is done where the system has no files in memory, and where somebody handles this signal already.
    """
    status = read_status(os.getpid())
    if not status or _BIT & (_mask(status, "SigCgt") | _mask(status, "SigIgn")):
        return
    try:
        # A program that is executed instead of a fork does not inherit it.
        descriptor = os.memfd_create(f"{_NAME}{rank}")
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    except (AttributeError, OSError):
        return
    # The main thread's alone: it is where the signal arrives. Others run meanwhile, and their frames would change while they
    # are read.
    faulthandler.register(SIGNAL, file=descriptor, all_threads=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def ask(pids: Sequence[int]) -> dict[int, Stack]:
    """Return the stacks of processes of this host. A process goes on afterwards as if it had not been asked."""
    with ThreadPoolExecutor(max(1, min(len(pids), MOST_AT_ONCE))) as pool:
        return dict(zip(pids, pool.map(_ask, pids), strict=True))


def _ask(pid: int) -> Stack:
    status = read_status(pid)
    state = status.get("State", "")[:1]
    if not status or state in "ZX":
        return Stack("none", why="it has ended" if Path("/proc/self").exists() else "this system has no /proc")
    rank: int | None = None
    reasons = []
    try:
        with _open_dump(pid) as (rank, descriptor):
            return Stack("faulthandler", _at_signal(pid, descriptor), state=state, rank=rank)
    except _Unread as error:
        reasons.append(str(error))
    try:
        return Stack("py-spy", _from_outside(pid), state=state, rank=rank)
    except _Unread as error:
        reasons.append(str(error))
    return Stack("none", why="; ".join(reasons), state=state, rank=rank)


# --------------------------------------------------------------------------------------------------------- by the signal
@contextlib.contextmanager
def _open_dump(pid: int) -> Iterator[tuple[int, int]]:
    """Open the file into which a process writes its stack; return its rank and a descriptor.

    Raises:
        _Unread: it has none.
    """
    folder = Path(f"/proc/{pid}/fd")
    try:
        # Looked for each time: a process that has closed all its descriptors would write the stack into whichever file has
        # the number now.
        links = {each: os.readlink(each) for each in folder.iterdir() if each.is_symlink()}
        path = next(each for each, target in links.items() if target.startswith(f"/memfd:{_NAME}"))
        descriptor = os.open(path, os.O_RDWR)
    except (StopIteration, OSError):
        raise _Unread("mtrain did not take part in its start") from None
    try:
        yield int(links[path].removeprefix(f"/memfd:{_NAME}").partition(" ")[0]), descriptor
    finally:
        os.close(descriptor)


def _at_signal(pid: int, descriptor: int) -> tuple[Frame, ...]:
    """Send the signal to a process and return what it has written.

    Raises:
        _Unread: it cannot answer, or has not.
    """
    deadline = time.monotonic() + ANSWER_S
    # Processes that were forked from one rank share the file, and somebody else may ask at the same time.
    while not _is_locked(descriptor):
        if time.monotonic() > deadline:
            raise _Unread("another process is asking it")
        time.sleep(POLL_S)
    if _age_s(pid) < BEGINNING_S:
        raise _Unread("it has just begun")
    _refuse_signal(read_status(pid))
    os.ftruncate(descriptor, 0)
    try:
        os.kill(pid, SIGNAL)
    except OSError as error:
        raise _Unread(f"it cannot be signalled: {error.strerror}") from None
    sent = time.monotonic()
    while True:
        # While the signal waits it is pending, and while its handler runs it is blocked; between the two it is neither, so a
        # file that is still empty proves nothing yet. Its size is read first: whoever has begun to write is seen to write.
        has_written = os.fstat(descriptor).st_size > 0
        status, now = read_status(pid), time.monotonic()
        if status and _BIT & (_pending(status) | _mask(status, "SigBlk")):
            if now > deadline:
                raise _Unread(f"it has not answered a signal for {ANSWER_S:g} s")
        elif not status or has_written or now > sent + QUIET_S:
            break
        time.sleep(POLL_S)
    frames = parse_dump(os.pread(descriptor, MAX_BYTES, 0))
    if not frames:
        raise _Unread("it has written no stack")
    return frames


def _is_locked(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _refuse_signal(status: Mapping[str, str]) -> None:
    """Refuse a process that would not survive the signal, or would not answer it.

    Raises:
        _Unread: it is one.
    """
    state = status.get("State", "X")[:1]
    if state in _NO_SIGNAL:
        raise _Unread(_NO_SIGNAL[state])
    if status.get("TracerPid", "0") != "0":
        raise _Unread("a debugger is attached to it")
    if not _mask(status, "SigCgt") & _BIT or _mask(status, "SigBlk") & _BIT:
        raise _Unread("it does not handle the signal at which ranks write their stacks")
    if _pending(status) & _BIT:
        raise _Unread("it has not answered an earlier signal")


def parse_dump(written: bytes) -> tuple[Frame, ...]:
    """Return the calls of the last stack that faulthandler has written; a line that is torn is left out."""
    text = written.decode("utf-8", errors="replace").rpartition("(most recent call first):\n")[2]
    found = (_FRAME.match(line) for line in text.split("\n"))
    return tuple(_frame(match["file"], match["line"], match["function"]) for match in found if match)


def _frame(file: str, line: str, function: str) -> Frame:
    return Frame(_unescape(file), int(line) if line.isdigit() else 0, _unescape(function))


def _unescape(text: str) -> str:
    """Return a name with the characters that faulthandler writes as escapes, all but those of ASCII."""
    return _ESCAPED.sub(lambda match: chr(min(int(next(filter(None, match.groups())), 16), sys.maxunicode)), text)


# ---------------------------------------------------------------------------------------------------------- from outside
def find_reader() -> str | None:
    """Return the program py-spy, of this environment if it has it; None: it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _from_outside(pid: int) -> tuple[Frame, ...]:
    """Let py-spy read the stack of a process, which it does not stop for that.

    Raises:
        _Unread: it is not installed, or cannot read the stack.
    """
    program = find_reader()
    if program is None:
        raise _Unread("py-spy, which could read its stack from outside, is not installed")
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=READER_S, check=False)  # noqa: S603
        threads = json.loads(ended.stdout) if ended.returncode == 0 else []
        main = next(thread for thread in threads if thread["os_thread_id"] == pid)
        return tuple(Frame(each["filename"], int(each["line"]), each["name"]) for each in main["frames"])
    except subprocess.TimeoutExpired:
        raise _Unread(f"py-spy has not read its stack in {READER_S:g} s") from None
    except (OSError, ValueError, TypeError, LookupError, StopIteration):
        raise _Unread("py-spy cannot read its stack; it may not be allowed to (see ptrace_scope)") from None


# ----------------------------------------------------------------------------------------------------------------- /proc
def _age_s(pid: int) -> float:
    """Return for how many seconds a process has existed; infinity: it has ended."""
    _, fields = read_stat(pid)
    if not fields:
        return float("inf")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[BEGAN]) / os.sysconf("SC_CLK_TCK")


def _mask(status: Mapping[str, str], name: str) -> int:
    return int(status.get(name, "0"), 16)


def _pending(status: Mapping[str, str]) -> int:
    return _mask(status, "SigPnd") | _mask(status, "ShdPnd")


_LIBRARIES = (f"{sysconfig.get_path('stdlib')}/", f"{Path(__file__).parents[1]}/", "<")
"""How the names of files begin that are Python's, mtrain's, or no files."""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+/|/packages/mtrain-[a-z]+/src/")


def _is_own(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and not _INSTALLED.search(file)
