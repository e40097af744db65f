"""The process of one rank: its log, its signals, and the record of its failure."""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from mtrain.errors import MtrainError
from mtrain.spec import outputs
from mtrain.system import attempts, stacks
from mtrain.system.failures import write_failure
from mtrain.system.runfolder import RunFolder

RANK_VARIABLES = ("RANK", "HOROVOD_RANK", "PADDLE_TRAINER_ID", "OMPI_COMM_WORLD_RANK")
"""Variables in which launchers set a rank's number. The name of the log needs it before a framework is loaded."""
_PR_SET_PDEATHSIG = 1


def number(environ: Mapping[str, str]) -> int:
    """Return this process's rank as its launcher has set it; 0 without a launcher."""
    return next((int(environ[name]) for name in RANK_VARIABLES if environ.get(name, "").isdigit()), 0)


LET_THREADS_END_S = 0.02
"""Pause before Python ends."""
SAME_REQUEST_S = 5.0
"""Seconds after a requested save in which another SIGUSR1 belongs to the same request."""


class SaveRequest:
    """A request to this rank to save and to go on, made with SIGUSR1, and read by the trainer between updates."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending = False
        self._served_at = float("-inf")

    def listen(self) -> None:
        """Block the signal for good, in this thread and those that it starts."""
        # Blocked and looked for, not handled: so it interrupts no call of a library, and the processes that a rank starts
        # inherit the block, so that none of them dies of it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signal within the context. A handler that the program has is called as well."""
        # Handled and not blocked as in `listen`: the program may have threads already, which a block in this one does not reach.
        former = signal.getsignal(signal.SIGUSR1)

        def take(number: int, frame: FrameType | None) -> None:
            self._pending = True
            if callable(former):
                former(number, frame)

        signal.signal(signal.SIGUSR1, take)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, former)

    def __call__(self) -> bool:
        """Return whether a request waits to be served."""
        if signal.SIGUSR1 in signal.sigpending():
            signal.sigwait({signal.SIGUSR1})
            self._pending = True
        # A scheduler may signal a rank, its starter and other hosts at once, and each of them passes the signal on.
        if self._clock() - self._served_at < SAME_REQUEST_S:
            self._pending = False
        return self._pending

    def mark_served(self) -> None:
        """Note that all ranks save now because one of them was asked to."""
        self._pending, self._served_at = False, self._clock()


class StopRequest:
    """A request to this rank to end: set by SIGTERM and SIGINT, read by the trainer between updates."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that was received; None: none."""
        self.save = SaveRequest()
        """The request to save and to go on, which has a signal of its own."""
        self._is_left = False

    def __call__(self) -> bool:
        """Return whether a request was received."""
        return self.signal is not None

    def listen(self) -> None:
        """Take over SIGTERM, SIGINT and SIGUSR1 for good, as the process of a rank does."""
        self.save.listen()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._on_signal)

    def leave_to_script(self) -> None:
        """Let the signals act as in any program, for a script that never asks whether it is to end.

        SIGTERM and SIGINT end it, and SIGUSR1, by which a whole job is asked to save, does nothing, until the script sets
        handlers of its own.
        """
        self._is_left = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        if self.signal is not None:  # it came before the script had begun
            os.kill(os.getpid(), self.signal)

    def take_back(self) -> None:
        """Take over the signals that were left to the script: it asks after all, from another file."""
        if self._is_left:
            self._is_left = False
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            self.listen()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGTERM, SIGINT and SIGUSR1 within the context. A second signal to end acts as it did before."""
        former = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}

        # The former handlers come back at the first signal, so that a second Ctrl-C ends a program that is stuck.
        def once(number: int, frame: FrameType | None) -> None:
            self._on_signal(number, frame)
            for name, handler in former.items():
                signal.signal(name, handler)

        try:
            for name in former:
                signal.signal(name, once)
            with self.save.listening():
                yield
        finally:
            for name, handler in former.items():
                signal.signal(name, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; from now on SIGTERM is ignored, unless the script handles it."""
    # A starter sends SIGTERM to the other ranks as soon as the first one has ended, while these may still be saving.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.default_int_handler(number, frame)


class Leaving:
    """Writes a rank's error to ``failures/rank-N.json`` for the starter.

    The starter prints the errors of all ranks, the earliest one last. Record an error *before* leaving the backend. The
    other ranks notice only when the backend is left, so their own errors are later. The same error is written once.
    """

    def __init__(self, run_folder: RunFolder, rank: int, *, attempt: str = "") -> None:
        self._run_folder = run_folder
        self._rank = rank
        self._attempt = attempt
        self._recorded: BaseException | None = None

    def __call__(self, error: BaseException) -> None:
        """Print and write ``error``."""
        if error is self._recorded:
            return
        self._recorded = error
        with contextlib.suppress(OSError):  # the log's disk may be full, but the failure must be recorded all the same
            if isinstance(
                error, MtrainError
            ):  # rank 0's output is shown, and a mistake of the user has words; the record has the rest
                sys.stderr.writelines(traceback.format_exception_only(error))
            else:
                traceback.print_exception(error)
            sys.stderr.flush()
        try:
            write_failure(self._run_folder, self._rank, error, attempt=self._attempt)
        except OSError as full:  # without the record, the log or the exit status must suffice
            with contextlib.suppress(OSError):
                print(f"{self._run_folder.failures}: {full}", file=sys.stderr, flush=True)


def run(work: Callable[[StopRequest, Leaving], None], *, run_folder: RunFolder, environ: Mapping[str, str]) -> int:
    """Do ``work`` as the rank of the job in ``run_folder`` that ``environ`` describes; return the exit code.

    Output goes to ``logs/rank-N.log``. An error is recorded for the starter. The process ends when its starter does.
    """
    rank, mark = number(environ), attempts.read(environ)
    # The log first: whatever goes wrong from here on is found in it.
    _log_to(run_folder.rank_log(rank))
    stacks.register(rank)
    end_with_parent()
    attempts.join(mark, run_folder.path, rank=rank)
    stop = StopRequest()
    stop.listen()
    leave = Leaving(run_folder, rank, attempt="" if mark is None else mark.attempt)
    try:
        work(stop, leave)
    except MtrainError as error:
        leave(error)
        return error.exit_code
    except BaseException as error:
        leave(error)
        if isinstance(error, SystemExit):
            raise
        return 1
    finally:
        # A thread of a framework may be waiting to drop its last reference to an object of Python, as one of gloo does after an
        # exchange. If Python ends first, the thread aborts the process, and a finished job counts as failed.
        time.sleep(LET_THREADS_END_S)
    return 0


def _log_to(path: Path) -> None:
    """Send standard output and error of this process, native code included, to ``path``."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with outputs.open_to_write(path, "ab") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def end_with_parent() -> None:
    """Ask the kernel to send SIGTERM when the starter dies; outside Linux the starter's own clean-up must suffice."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the starter died before the request was registered
        os.kill(os.getpid(), signal.SIGTERM)
