"""Start the processes of a job on this machine, find all their descendants, and end them."""

import ctypes
import errno
import functools
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from mtrain.errors import UsageError
from mtrain.spec import outputs

SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36
"""Options of prctl(2)."""
KILL_ROUNDS = 30
"""Number of attempts, of about a second each, to kill processes. One in uninterruptible sleep may outlive them all."""
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit code of mtrain, by the signal that asked for the end of a job."""
SPARE_FILES = 256
"""Files that a process has open besides those that ``allow_open_files`` counts."""


def start(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, kept_files: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start a command in a session of its own and append its output to ``log``; it gets SIGTERM when this process dies.

    SIGUSR1 ends neither it nor the processes that it starts, see ``preparation``. ``kept_files``: descriptors that it inherits.

    Raises:
        OSError: the program cannot be executed.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with outputs.open_to_write(log, "ab") as output:
        return subprocess.Popen(  # noqa: S603
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=kept_files,
            preexec_fn=preparation(),
        )


def start_piped(argv: Sequence[str], *, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a command like ``start``, but with pipes to its standard input, output and error.

    Raises:
        OSError: the program cannot be executed.
    """
    common: Any = {
        "env": dict(env),
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "bufsize": 0,
        "start_new_session": True,
    }
    # A leader of a thousand hosts starts a thousand, and a function that runs before the command makes Python copy the tables
    # of this process's memory for each (fork instead of vfork). So ``setpriv`` asks for the signal in its place, where it is
    # installed; other threads than the main one, which alone may set aside a signal, go the long way.
    before = _asking_for_signal() if threading.current_thread() is threading.main_thread() else None
    if before is None:
        return subprocess.Popen(list(argv), **common, preexec_fn=preparation())  # noqa: S603
    if shutil.which(argv[0], path=env.get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    with sparing_children():
        return subprocess.Popen([*before, *argv], **common)  # noqa: S603


@functools.cache
def _asking_for_signal() -> tuple[str, ...] | None:
    """Return the beginning of a command that gets SIGTERM when its parent dies; None: this system has no program for it."""
    program = shutil.which("setpriv")
    if program is None:
        return None
    words = (program, "--pdeathsig", "TERM", "--")
    try:
        tried = subprocess.run([*words, program, "--version"], capture_output=True, timeout=10.0, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return words if tried.returncode == 0 else None


def preparation() -> Callable[[], None]:
    """Return what a new process does before it executes its command: it gets SIGTERM when its parent dies, and SIGUSR1 does not end it."""
    control = _prctl()

    def prepare() -> None:
        # By SIGUSR1 a scheduler or a user asks a job to save and to go on, and the starters of ranks would die of it. It is
        # blocked, so that a rank finds one that was sent to it while it started (Linux keeps a blocked signal though it is
        # ignored), and ignored, because some shells unblock everything.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if control:
            control(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)

    return prepare


@contextmanager
def sparing_children() -> Iterator[None]:
    """Return a context in which the main thread starts processes that SIGUSR1 does not end; a signal meanwhile is kept."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Return a context in which descendants whose parent dies become children of this process (on Linux)."""
    # Otherwise they would become children of another process and could not be found any more.
    control = _prctl()
    if control:
        control(SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        if control:
            control(SET_CHILD_SUBREAPER, 0)


def _prctl() -> Callable[[int, int], int] | None:
    """Return prctl(2), or None if the system has none. Callers look it up before they fork."""
    library = ctypes.CDLL(None, use_errno=True)
    return getattr(library, "prctl", None)


def descendants() -> list[psutil.Process]:
    """Return all living descendants of this process."""
    return [process for process in _children(os.getpid(), recursive=True) if _alive(process)]


def children_with(parent: int, arguments: Sequence[str]) -> list[psutil.Process]:
    """Return the descendants of ``parent`` whose command line ends with ``arguments``, without their forks.

    If such a process has started another such process (a shell that waits for it), only the inner one is returned.
    """
    matches, wanted = [], _without_empty_end(arguments)
    for child in _children(parent):
        words = _words(child)
        below = children_with(child.pid, arguments)
        if words[-len(wanted) :] != wanted:
            matches += below
        else:  # A descendant with the same command line is a fork of the child.
            matches += [process for process in below if _words(process) != words] or [child]
    return matches


def _children(parent: int, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(parent).children(recursive=recursive)
    except psutil.Error:
        return []


def ids_below(parent: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    return [child.pid for child in _children(parent, recursive=True)]


def name_of(pid: int) -> str:
    """Return the name of a process's program; empty: there is no such process."""
    return "".join(process.name() for process in by_id(pid))


def _words(process: psutil.Process) -> list[str]:
    try:
        return _without_empty_end(process.cmdline())
    except psutil.Error:
        return []


def _without_empty_end(words: Sequence[str]) -> list[str]:
    """Leave out empty words at the end. A process that has shortened its own command line seems to have some."""
    count = next((number for number in range(len(words), 0, -1) if words[number - 1]), 0)
    return list(words[:count])


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that still lives. psutil checks that its id has not passed to another process."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def end_trees(pids: Sequence[int]) -> None:
    """Kill processes and all their descendants, which are looked for once among all processes of the machine."""
    if not pids:
        return
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    ending = [process for pid in pids for process in by_id(pid)]
    for process in ending:  # grows while it is read
        ending += children.pop(process.pid, [])
    send(ending, signal.SIGKILL)


def end_all(*, spare: frozenset[int], grace_s: float) -> list[int]:
    """End every descendant except those in ``spare``: send SIGTERM, and SIGKILL to those that remain after ``grace_s``.

    Return the ids of the processes that had to be killed. Processes that start meanwhile are ended too.
    """
    if grace_s > 0:
        send(_others(spare), signal.SIGTERM)
        _wait_for_others(spare, timeout_s=grace_s)
    killed: set[int] = set()
    for _ in range(KILL_ROUNDS):
        remaining = _others(spare)
        if not remaining:
            break
        killed.update(process.pid for process in remaining)
        send(remaining, signal.SIGKILL)
        _wait_for_others(spare, timeout_s=1.0)
    return sorted(killed)


def _wait_for_others(spare: frozenset[int], *, timeout_s: float) -> None:
    """Wait for the other descendants to end, but do not reap them: ``subprocess`` still needs their exit status."""
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
    """Return a list with the process of that id; empty if there is none."""
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


def reap(*, spare: int) -> None:
    """Reap adopted processes that have ended, except ``spare``, whose exit status the caller collects itself."""
    # The kernel is asked for one that has ended: searching all processes of the machine ten times a second would take CPU
    # time away from the ranks.
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in (0, spare):
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return


def allow_open_files(count: int, *, what: str) -> None:
    """Raise this process's own limit, if need be, so that it can have ``count`` files open for ``what``.

    Raises:
        UsageError: the system allows less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{what}: {needed} files must be open at once, and this machine allows a process {hard}; raise the limit "
            "(LimitNOFILE of systemd, or /etc/security/limits.conf), see `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


HERE = "here"
"""Name of the place of requests that reached this process as signals."""


SAME_REQUEST_S = 2.0
"""Seconds after a SIGTERM in which another one at the same place belongs to the same request: schedulers and the
processes between may each send one. Ctrl-C counts each time."""


class Requests:
    """Counts requests to end a job: SIGINT and SIGTERM to this process, and requests that other hosts pass on.

    Inside ``with`` the two signals are only counted, instead of ending this process. A scheduler sends a request to
    every host of a job at the same time, which is only one request. So requests are counted separately for each place,
    and only a second one at the same place means to end at once. SIGUSR1, a request to save and to go on, is counted in
    ``saves``.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at: float | None = None
        """Time of the first request, in seconds since 1970."""
        self.saves = 0
        """How many times this process, or another host, was asked to save and to go on."""
        self._times: dict[str, int] = {}
        self._former: dict[signal.Signals, object] = {}
        self._former_mask: set[int] = set()
        self._terminated_at = float("-inf")

    @property
    def count(self) -> int:
        """Largest number of requests at one place; above 1, everything must end at once."""
        return max(self._times.values(), default=0)

    @property
    def places(self) -> int:
        """Number of other places at which there was a request."""
        return len(self._times.keys() - {HERE})

    def __enter__(self) -> "Requests":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._former[number] = signal.signal(number, self._take)
        # An agent that another process of mtrain has started begins with SIGUSR1 blocked.
        self._former_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._former_mask)
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def any(self) -> bool:
        """Return whether there was a request."""
        return self.first is not None

    def take(self, number: signal.Signals, *, place: str = HERE, times: int | None = None) -> None:
        """Count a request at ``place``. ``times``: total number of requests there so far; None: one more."""
        self._times[place] = self._times.get(place, 0) + 1 if times is None else max(times, self._times.get(place, 0))
        if self.first is None:
            self.first, self.first_at = number, time.time()

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGUSR1:
            self.saves += 1
            return
        now = time.monotonic()
        again = number == signal.SIGTERM and now - self._terminated_at < SAME_REQUEST_S
        if number == signal.SIGTERM and not again:
            self._terminated_at = now
        if not again:
            self.take(signal.Signals(number))
