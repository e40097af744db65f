"""Processes that prepare samples, forked once, fed through one pipe and heard through one pipe each.

All workers read the same task pipe: a record is as long as a cache line and pipes hand out whole records (they divide
PIPE_BUF), so whoever is free takes the oldest task; no lock can be left behind by a worker that dies. Results are
small and pickled; large arrays do not pass here.

A worker ends with its parent in any case: the kernel kills it when the thread that forked it ends (Linux), it
compares its parent's id once after that is arranged, and the task pipe ends. It ignores SIGINT and SIGTERM, which go
to whole process groups: its parent decides when to end, after saving what is to be saved."""

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import struct
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, Protocol

import cv2

from mtrain.core.interfaces import Array
from mtrain.errors import MtrainError, TrainingError

_RECORD = struct.Struct("<8q")
_CHUNK = 4096 // _RECORD.size
"""Records that one write passes on undivided: PIPE_BUF."""
_PIPE_BYTES = 1 << 20
"""Asked for the result pipes, so that workers run ahead while the parent computes."""
_WATCH_S = 0.5
"""How often a waiting parent looks after its workers besides hearing of their end."""
_GRACE_S = 2.0
"""Time to finish the sample in hand at the end."""
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Task(NamedTuple):
    """One sample to prepare."""

    source: int
    loader: int
    """Whose it is, to be cancelled together."""
    serial: int
    """Which micro batch."""
    epoch: int
    update: int
    """Of the epoch."""
    sample: int
    start: int
    """Where in the ring the micro batch begins."""
    position: int
    """Which sample of the micro batch."""


class Result(NamedTuple):
    """What became of a task."""

    serial: int
    position: int
    item: Any
    error: str | None
    """What went wrong; with a traceback unless it is the user's data."""


class Executor(Protocol):
    """Tasks in, results out."""

    def submit(self, tasks: Iterable[Task]) -> None:
        """Queue tasks. Does not wait."""
        ...

    def collect(self) -> list[Result]:
        """At least one result, as soon as there is one. A task must be under way."""
        ...

    def close(self) -> None:
        """End what was started. Can be called twice."""
        ...


def attempt(handle: Callable[[Task], Any], task: Task) -> Result:
    """Run a task; an exception becomes the result's text."""
    try:
        return Result(task.serial, task.position, handle(task), None)
    except MtrainError as error:
        return Result(task.serial, task.position, None, str(error))
    except Exception:
        return Result(task.serial, task.position, None, traceback.format_exc())


class Inline:
    """No processes: a task runs when its result is waited for."""

    def __init__(self, handle: Callable[[Task], Any]) -> None:
        self._handle = handle
        self._tasks: deque[Task] = deque()

    def submit(self, tasks: Iterable[Task]) -> None:
        """Queue tasks."""
        self._tasks.extend(tasks)

    def collect(self) -> list[Result]:
        """Run the oldest task."""
        return [attempt(self._handle, self._tasks.popleft())]

    def close(self) -> None:
        """Forget what is queued."""
        self._tasks.clear()


class Workers:
    """Forked processes. Fork them while this process has one thread and no framework; from the main thread."""

    def __init__(self, count: int, handle: Callable[[Task], Any], stop: Array) -> None:
        """``handle`` runs in the workers. ``stop``: one shared byte; a worker that sees it set takes no other task."""
        self._backlog: deque[bytes] = deque()
        self._stop = stop
        self._failure: TrainingError | None = None
        tasks_out, self._tasks = os.pipe()
        os.set_blocking(self._tasks, False)
        self._selector = selectors.DefaultSelector()
        self._pids: dict[Connection, int] = {}
        for _ in range(count):
            results, results_in = os.pipe()
            pid = _fork(
                partial(_serve, handle, tasks_out, results_in, stop),
                unneeded=[self._tasks, results, *(c.fileno() for c in self._pids)],
            )
            os.close(results_in)
            connection = Connection(results, writable=False)
            self._pids[connection] = pid
            self._selector.register(connection, selectors.EVENT_READ)
        os.close(tasks_out)
        self._end = weakref.finalize(self, _end, os.getpid(), self._tasks, list(self._pids.values()), stop)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return list(self._pids.values())

    def submit(self, tasks: Iterable[Task]) -> None:
        """Queue tasks; what the pipe does not take now goes with the next call of any method.

        Raises:
            TrainingError: a worker has died.

        """
        records = [_RECORD.pack(*task) for task in tasks]
        self._backlog.extend(b"".join(records[i : i + _CHUNK]) for i in range(0, len(records), _CHUNK))
        self._flush()

    def collect(self) -> list[Result]:
        """Results that have arrived; waits for one.

        Raises:
            TrainingError: a worker has died.

        """
        while True:
            self._flush()
            results = []
            for key, _ in self._selector.select(_WATCH_S if not self._backlog else 0.01):
                connection: Any = key.fileobj
                try:
                    results.append(connection.recv())
                except (EOFError, OSError):
                    self._fail(self._pids[connection])
            if results:
                return results
            for pid in self.pids:
                if not _runs(pid):
                    self._fail(pid)

    def close(self) -> None:
        """End the workers: they finish the sample in hand, or are killed after two seconds."""
        self._end()
        for connection in self._pids:
            connection.close()
        self._pids.clear()
        self._selector.close()
        self._backlog.clear()

    def _flush(self) -> None:
        if self._failure:
            raise self._failure
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a broken pipe shows as the end of a result pipe
            while self._backlog:
                os.write(self._tasks, self._backlog[0])
                self._backlog.popleft()

    def _fail(self, pid: int) -> NoReturn:
        status = _status(pid)
        how = f"was killed by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"ended with {status}"
        hint = "; the machine may be out of memory: use fewer data.workers" if status == -signal.SIGKILL else ""
        for other in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        self.close()
        self._failure = TrainingError(f"data loader: worker process {pid} {how}{hint}")
        raise self._failure


def _fork(run: Callable[[], None], *, unneeded: Iterable[int]) -> int:
    """A child that does ``run`` and nothing else; its id. ``unneeded``: the parent's descriptors, closed in the
    child."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        _die_with(parent)
        for descriptor in unneeded:
            os.close(descriptor)
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(handle: Callable[[Task], Any], tasks: int, results_in: int, stop: Array) -> None:
    gc.freeze()  # what was inherited is not looked through again, so its pages stay shared
    cv2.setNumThreads(0)
    _keep_memory()
    _widen(results_in)
    results = Connection(results_in, readable=False)
    while not stop[0] and (record := os.read(tasks, _RECORD.size)):
        results.send(tuple(attempt(handle, Task(*_RECORD.unpack(record)))))


def _keep_memory() -> None:
    """Pictures come and go: without this glibc gives each one's pages back to the system and asks for them again."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _widen(pipe: int) -> None:
    with contextlib.suppress(AttributeError, OSError, ImportError):
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _runs(pid: int) -> bool:
    """Leaves an ended process for ``_status``."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _status(pid: int) -> int:
    """How a process ended, negative: by which signal; waits a moment for one that is just ending."""
    with contextlib.suppress(ChildProcessError):
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
    return 1


def _end(owner: int, tasks: int, pids: list[int], stop: Array) -> None:
    """Also run when the interpreter ends; in a fork of the owner it does nothing."""
    if os.getpid() != owner:
        return
    stop[0] = 1
    os.close(tasks)
    deadline = time.monotonic() + _GRACE_S
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.002)
    for pid in pids:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            if _runs(pid):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
