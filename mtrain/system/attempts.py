"""Attempts of a job on one host: to which of them a rank belongs, and whether ranks of an earlier one still run.

The process that starts a host's command draws a mark for each attempt and passes it to the ranks in an environment
variable, because that reaches a rank through every starter in between. A rank writes the mark into the record of its
failure, holds the lock of the host's ranks for as long as it runs and, in a job on several hosts, is killed by itself
when the process that drew the mark dies.
"""

import fcntl
import os
import re
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtrain.errors import UsageError
from mtrain.spec import outputs
from mtrain.spec.reserved import JOB_ATTEMPT as VARIABLE
from mtrain.system.proc import BEGAN, read_stat

__all__ = ["VARIABLE", "Mark", "await_former_ranks", "draw_mark", "join", "read"]

POLL_S = 0.05
"""Seconds between two looks at the lock of the ranks."""
FORMER_S = 20.0
"""Seconds that ranks of an earlier attempt may take to end."""
MAX_LOCK_BYTES = 1 << 20
"""How much is read of the list of ranks in the file of their lock."""
_LOCK_LINE = re.compile(r"[0-9]{1,19} [0-9]{1,19}( [0-9]{1,19})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The mark of one attempt of a job on one host."""

    attempt: str
    """Random name of the attempt on this host."""
    owner: int
    """Id of the process that started the host's command: the agent, or ``mtrain`` itself on the only host."""
    owner_ticks: int
    """When that process started, in the kernel's ticks, which tell it from a later process with its id."""
    node: int | None
    """Number of this host; None: it is the only host of the job."""

    def variables(self) -> dict[str, str]:
        """Return the environment variable of the ranks."""
        node = "" if self.node is None else str(self.node)
        return {VARIABLE: f"{self.attempt}:{self.owner}:{self.owner_ticks}:{node}"}


def draw_mark(node: int | None) -> Mark:
    """Draw the mark of a new attempt whose command this process is about to start."""
    own = os.getpid()
    return Mark(attempt=secrets.token_hex(8), owner=own, owner_ticks=_ticks(own), node=node)


def read(environ: Mapping[str, str]) -> Mark | None:
    """Return the mark of the attempt to which this rank belongs; None: no process of mtrain has started it."""
    attempt, *numbers = environ.get(VARIABLE, "").split(":")
    if len(numbers) != 3 or not all(number.isdigit() for number in numbers[:2]):
        return None
    owner, ticks, node = numbers
    node_number = int(node) if node.isdigit() else None
    return Mark(attempt=attempt, owner=int(owner), owner_ticks=int(ticks), node=node_number)


# ------------------------------------------------------------------------------------------------------------ in a rank
def join(mark: Mark | None, run: Path, *, rank: int = 0) -> None:
    """Take part in an attempt: end with its owner where there are several hosts, and hold the lock of the ranks."""
    if mark is None:
        return
    # On the only host, ranks whose owner dies are asked to end by their starter, and save first; the next attempt waits for
    # the lock. A rank of several hosts cannot save by itself, and the hosts that are left may start again at once.
    if mark.node is not None:
        _die_with(mark)
    with suppress(OSError):  # no locks on this file system, or no room: the attempt must run all the same
        descriptor = os.open(_lock_file(run, mark.node), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # The descriptor stays open until this process ends.
        os.write(descriptor, f"{os.getpid()} {_ticks(os.getpid())} {rank}\n".encode())


def _die_with(mark: Mark) -> None:
    """Have this process killed when the owner of the attempt dies. Where the kernel cannot tell, starters must do."""
    try:
        descriptor = os.pidfd_open(mark.owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except (AttributeError, OSError):
        return
    if _ticks(mark.owner) != mark.owner_ticks:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        watched = select.poll()
        watched.register(descriptor, select.POLLIN)
        watched.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="owner of the attempt", daemon=True).start()


# ----------------------------------------------------------------------------------------------- before the next attempt
def await_former_ranks(run: Path, node: int | None, *, timeout_s: float = FORMER_S) -> None:
    """Wait until no rank of an earlier attempt runs on this host, and forget those that did.

    In a job on several hosts they are killed: their attempt is over, and they cannot save by themselves.

    Raises:
        UsageError: some still run after ``timeout_s``.
    """
    try:
        file = outputs.open_to_write(_lock_file(run, node), "a+b", buffering=0)
    except OSError:
        return
    with file:
        descriptor = file.fileno()
        deadline = time.monotonic() + timeout_s
        while not _is_free(descriptor):
            ranks = _living_of(descriptor)
            if node is not None:
                _each(ranks, lambda pid: os.kill(pid, signal.SIGKILL))
            if time.monotonic() > deadline:
                named = " ".join(map(str, ranks))
                raise UsageError(
                    f"{run}: ranks of an earlier attempt still run on this host (processes {named or 'unknown'}); wait "
                    f"until they have saved, or end them{f' with: kill -9 {named}' if named else ''}"
                )
            time.sleep(POLL_S)
        file.truncate(0)


def _is_free(descriptor: int) -> bool:
    """Return whether nobody else holds the lock; then this process does, until it closes the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # The file system has no locks.
        return True
    return True


def _living_of(descriptor: int) -> list[int]:
    """Return the processes in the file of the lock that still live."""
    return [entry[0] for entry in _entries(descriptor) if 0 < _ticks(entry[0]) == entry[1]]


def _entries(descriptor: int) -> list[tuple[int, ...]]:
    """Return the lines of the file of the lock: process, its start in ticks, and its rank. Lines of others are left out."""
    lines = os.pread(descriptor, MAX_LOCK_BYTES, 0).decode(errors="replace").splitlines()
    found = (_LOCK_LINE.fullmatch(line) for line in lines)
    return [tuple(int(word) for word in match[0].split()) for match in found if match]


def read_ranks(run: Path, node: int | None) -> dict[int, tuple[int, ...]]:
    """Return the ranks of the attempt on this host that have begun: rank -> process, and when that started in the kernel's ticks."""
    try:
        descriptor = os.open(_lock_file(run, node), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        return {entry[2]: entry[:2] for entry in _entries(descriptor) if len(entry) == 3}
    except OSError:
        return {}
    finally:
        os.close(descriptor)


def living_ranks(run: Path, node: int | None) -> dict[int, int]:
    """Return the ranks of ``read_ranks`` that still live: rank -> process."""
    return {rank: pid for rank, (pid, began) in read_ranks(run, node).items() if 0 < _ticks(pid) == began}


def _each(pids: list[int], action: Callable[[int], None]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            action(pid)


def _lock_file(run: Path, node: int | None) -> Path:
    """Return the file of the lock of a host's ranks; hosts may share the folder."""
    return run / f".ranks-{node or 0}"


def _ticks(pid: int) -> int:
    """Return when a process started, in the kernel's ticks; 0 where that is unknown, or it does not live."""
    _, fields = read_stat(pid)
    return int(fields[BEGAN]) if fields and fields[0] not in "ZX" else 0
