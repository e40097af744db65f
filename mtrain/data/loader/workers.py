"""Run processes that prepare samples. They are forked once, share one task pipe, and each have a result pipe.

Results are small and pickled; large arrays do not pass through the pipes. A worker ends with its parent in any case."""

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
from typing import Any, NamedTuple, NoReturn

from mtrain.core.interfaces import Array
from mtrain.errors import MtrainError, TrainingError

_RECORD = struct.Struct("<8q")
_CHUNK = 4096 // _RECORD.size
"""Records that one write passes on undivided (PIPE_BUF bytes)."""
_PIPE_BYTES, _ALL_PIPES_BYTES = 1 << 20, 8 << 20
"""Requested size of a result pipe, so that workers run ahead while the parent computes, and of all together: Linux limits
the pipes of a user (64 MiB by default), and those beyond it hold 4 KiB."""
_WATCH_S = 0.5
"""Interval in seconds at which a waiting parent checks its workers, besides noticing closed pipes."""
_GRACE_S = 2.0
"""Seconds that a worker gets at the end to finish its current sample."""
_IGNORED = (signal.SIGINT, signal.SIGTERM)
"""Signals that go to whole process groups, which workers ignore."""
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class Task(NamedTuple):
    """One sample to prepare."""

    source: int
    loader: int
    """Number of the loader; its tasks are cancelled together."""
    serial: int
    """Number of the micro batch."""
    epoch: int
    update: int
    """Number of the update within the epoch."""
    sample: int
    start: int
    """First place of the micro batch in the ring."""
    position: int
    """Position of the sample within the micro batch."""


class Result(NamedTuple):
    """The outcome of a task."""

    serial: int
    position: int
    item: Any
    error: str | None
    """The error message, with a traceback unless the user's data is at fault; None on success."""


def attempt(handle: Callable[[Task], Any], task: Task) -> Result:
    """Run a task; an exception becomes the result's error text."""
    try:
        return Result(task.serial, task.position, handle(task), None)
    except MtrainError as error:
        return Result(task.serial, task.position, None, str(error))
    except Exception:
        return Result(task.serial, task.position, None, traceback.format_exc())


class Inline:
    """Run each task in this process, at the moment its result is requested."""

    def __init__(self, handle: Callable[[Task], Any]) -> None:
        self._handle = handle
        self._tasks: deque[Task] = deque()

    def submit(self, tasks: Iterable[Task]) -> None:
        """Queue tasks. Does not wait."""
        self._tasks.extend(tasks)

    def collect(self) -> list[Result]:
        """Run the oldest task and return its result."""
        return [attempt(self._handle, self._tasks.popleft())]

    def close(self) -> None:
        """Drop the queued tasks."""
        self._tasks.clear()


class Workers:
    """Forked worker processes. Create them in the main thread, while it is the only one and no framework is loaded."""

    def __init__(self, count: int, handle: Callable[[Task], Any], stop: Array) -> None:
        """``handle`` runs in the workers. ``stop``: one shared byte; a worker that sees it set takes no other task."""
        self._backlog: deque[bytes] = deque()
        self._stop = stop
        self._failure: TrainingError | None = None
        # All workers read the same pipe. Records divide PIPE_BUF, so that each is handed out
        # whole: a free worker takes the oldest task, and one that dies cannot leave a lock locked.
        tasks_out, self._tasks = os.pipe()
        os.set_blocking(self._tasks, False)
        self._selector = selectors.DefaultSelector()
        self._pids: dict[Connection, int] = {}
        for _ in range(count):
            results, results_in = os.pipe()
            pid = _fork(
                partial(_serve, handle, tasks_out, results_in, stop, pipe_bytes=pipe_bytes(count)),
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
        """Return the process ids of the running workers."""
        return list(self._pids.values())

    def submit(self, tasks: Iterable[Task]) -> None:
        """Queue tasks; those that do not fit into the pipe now are written by the next call of any method.

        Raises:
            TrainingError: a worker has died.

        """
        records = [_RECORD.pack(*task) for task in tasks]
        self._backlog.extend(b"".join(records[i : i + _CHUNK]) for i in range(0, len(records), _CHUNK))
        self._flush()

    def collect(self) -> list[Result]:
        """Return the results that have arrived, after waiting for at least one.

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
        """End the workers: they finish their current sample, or are killed after two seconds."""
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
        # A batch lacks the dead worker's sample for good, so the others have nothing to finish.
        for other in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        self.close()
        self._failure = TrainingError(f"data loader: worker process {pid} {how}{hint}")
        raise self._failure


def _fork(run: Callable[[], None], *, unneeded: Iterable[int]) -> int:
    """Fork a child that only runs ``run``, and return its id. ``unneeded``: the parent's descriptors, closed in the
    child."""
    parent = os.getpid()
    # A signal that comes before the child ignores it would end the child, or run the parent's handler in it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        pid = os.fork()
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return pid
    status = 1
    try:
        # They go to whole process groups, and the parent decides
        # when a worker ends, for example after saving a checkpoint.
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
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
    # The parent may have ended before the request, which then comes too late.
    if os.getppid() != parent:
        os._exit(1)


def pipe_bytes(workers: int) -> int:
    """Return the size to request for each result pipe of so many workers; a power of two, as pipes are."""
    return 1 << (min(_PIPE_BYTES, max(_ALL_PIPES_BYTES // workers, 1 << 16)).bit_length() - 1)


def _serve(handle: Callable[[Task], Any], tasks: int, results_in: int, stop: Array, *, pipe_bytes: int) -> None:
    gc.freeze()  # exempt inherited objects from garbage collection, so that their pages stay shared
    _leave_threads_to_the_pool()
    _keep_memory()
    _widen(results_in, pipe_bytes)
    results = Connection(results_in, readable=False)
    while not stop[0] and (record := os.read(tasks, _RECORD.size)):
        results.send(tuple(attempt(handle, Task(*_RECORD.unpack(record)))))


def _leave_threads_to_the_pool() -> None:
    """Have OpenCV compute in this thread alone: the workers are as many as there are cores to use."""
    with contextlib.suppress(ImportError):  # The data of a user's own may need no OpenCV.
        import cv2

        cv2.setNumThreads(0)


def _keep_memory() -> None:
    """Keep freed memory in the process."""
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        # Otherwise glibc returns each image's pages to the system and requests them again.
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc accepts
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _widen(pipe: int, size: int) -> None:
    with contextlib.suppress(AttributeError, OSError, ImportError):
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)


def _runs(pid: int) -> bool:
    """Return whether a process still runs; an ended one is not reaped, so that ``_status`` can read its exit code."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _status(pid: int) -> int:
    """Return the exit code of a process, negative for a signal, waiting a moment for one that is just ending."""
    with contextlib.suppress(ChildProcessError):
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
    return 1


def _end(owner: int, tasks: int, pids: list[int], stop: Array) -> None:
    """Stop the workers. This also runs when the interpreter exits; in a fork of the owner it does nothing."""
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
