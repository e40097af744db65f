"""Processes of a job on this machine: in a session of their own, found again wherever they hang, ended by id."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36
"""Options of prctl(2)."""
KILL_ROUNDS = 30
"""Seconds, about, that killed processes are given to disappear; one in uninterruptible sleep may not."""


def start(argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command whose output is appended to ``log``; it gets SIGTERM when this process dies.

    Raises:
        OSError: the program cannot be executed.
    """
    control = _prctl()
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=(lambda: control(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)) if control else None,
        )


def start_piped(argv: Sequence[str], *, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a command with pipes to its standard input, output and error, in a session of its own; else as ``start``.

    Raises:
        OSError: the program cannot be executed.
    """
    control = _prctl()
    return subprocess.Popen(  # noqa: S603
        list(argv),
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        preexec_fn=(lambda: control(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)) if control else None,
    )


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """While inside, descendants whose parent dies become children of this process instead of getting lost (Linux)."""
    control = _prctl()
    if control:
        control(SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        if control:
            control(SET_CHILD_SUBREAPER, 0)


def _prctl() -> Callable[[int, int], int] | None:
    """prctl(2), looked up before a fork; None where there is none."""
    library = ctypes.CDLL(None, use_errno=True)
    return getattr(library, "prctl", None)


def descendants() -> list[psutil.Process]:
    """All living processes below this one."""
    try:
        found = psutil.Process().children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if _alive(process)]


def children_with(parent: int, arguments: Sequence[str]) -> list[psutil.Process]:
    """Programs below ``parent`` whose command line ends with ``arguments``, not those that they forked.

    Where one runs another so (a shell that waits for it), the inner one.
    """
    found = []
    for child in _children(parent):
        words = _words(child)
        below = children_with(child.pid, arguments)
        if words[-len(arguments) :] != list(arguments):
            found += below
        else:  # a fork has the command line of its parent
            found += [process for process in below if _words(process) != words] or [child]
    return found


def _children(parent: int) -> list[psutil.Process]:
    try:
        return psutil.Process(parent).children()
    except psutil.Error:
        return []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each that still lives; psutil makes sure that the id was not taken over by another process."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def end_tree(pid: int) -> None:
    """Kill a process and everything below it."""
    for process in by_id(pid):
        try:
            below = process.children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        send([process, *below], signal.SIGKILL)


def end_all(*, spare: frozenset[int], grace_s: float) -> list[int]:
    """End every descendant but those in ``spare``: SIGTERM, and SIGKILL for who is left after ``grace_s``.

    Returns the ids of those that had to be killed. New ones that appear meanwhile are found too.
    """
    if grace_s > 0:
        send(_others(spare), signal.SIGTERM)
        _wait_for_others(spare, timeout_s=grace_s)
    killed: set[int] = set()
    for _ in range(KILL_ROUNDS):
        left = _others(spare)
        if not left:
            break
        killed.update(process.pid for process in left)
        send(left, signal.SIGKILL)
        _wait_for_others(spare, timeout_s=1.0)
    return sorted(killed)


def _wait_for_others(spare: frozenset[int], *, timeout_s: float) -> None:
    """Only looks: reaping them here would take the exit status away from ``subprocess``."""
    deadline = time.monotonic() + timeout_s
    while _others(spare) and time.monotonic() < deadline:
        time.sleep(0.02)


def _others(spare: frozenset[int]) -> list[psutil.Process]:
    return [process for process in descendants() if process.pid not in spare]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def by_id(pid: int) -> list[psutil.Process]:
    """The process of that id, if it lives."""
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


def reap(*, spare: int) -> None:
    """Collect adopted processes that have ended; ``spare`` is left to whoever waits for it.

    The kernel is asked for one that has ended: looking through all processes of a machine ten times a second would take a
    share of a core away from the ranks.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in (0, spare):
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return


HERE = "here"
"""The place of requests that came to this process as signals."""


class Requests:
    """Counts requests to end: SIGINT and SIGTERM while inside ``with``, instead of dying of them, and those that other hosts pass on.

    A scheduler asks every host of a job at once, which is one request told in many places. So requests are counted by place:
    only who asks twice in the same place wants the end at once.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at: float | None = None
        """When the first request came, in seconds since 1970."""
        self._times: dict[str, int] = {}
        self._former: dict[signal.Signals, object] = {}

    @property
    def count(self) -> int:
        """How often the most insistent place has asked; above 1: everything is to end at once."""
        return max(self._times.values(), default=0)

    def __enter__(self) -> "Requests":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def any(self) -> bool:
        """Whether there was one."""
        return self.first is not None

    def take(self, number: signal.Signals, *, place: str = HERE, times: int | None = None) -> None:
        """Count a request that was made at ``place``; ``times``: how often it was made there in all, None: once more."""
        self._times[place] = self._times.get(place, 0) + 1 if times is None else max(times, self._times.get(place, 0))
        if self.first is None:
            self.first, self.first_at = number, time.time()

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.take(signal.Signals(number))
