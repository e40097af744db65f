"""The process of one rank: its log, its signals, and what it leaves behind when it fails."""

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from mtrain.errors import MtrainError
from mtrain.system.runfolder import RunFolder, write_failure

RANK_VARIABLES = ("RANK", "HOROVOD_RANK", "PADDLE_TRAINER_ID", "OMPI_COMM_WORLD_RANK")
"""Where starters put a rank's number; asked before any framework is there, for the name of the log."""
_PR_SET_PDEATHSIG = 1


def number(environ: Mapping[str, str]) -> int:
    """This process's rank as its starter says; 0 where none does."""
    return next((int(environ[name]) for name in RANK_VARIABLES if environ.get(name, "").isdigit()), 0)


class StopRequest:
    """Whether this rank was asked to end: set by SIGTERM and SIGINT, read by the trainer between updates."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        """Whether it was asked."""
        return self._asked

    def listen(self) -> None:
        """Take over SIGTERM and SIGINT."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


class Leaving:
    """Writes ``failures/rank-N.json`` for the starter, which prints the first one last. The same error is left once.

    Leave an error *before* leaving the backend: only then do the other ranks notice, and what they raise is later.
    """

    def __init__(self, run_folder: RunFolder, rank: int) -> None:
        self._run_folder = run_folder
        self._rank = rank
        self._left: BaseException | None = None

    def __call__(self, error: BaseException) -> None:
        """Print and write ``error``."""
        if error is self._left:
            return
        self._left = error
        with contextlib.suppress(OSError):  # the log may lie on a full disk, and the failure must be left all the same
            traceback.print_exception(error)
            sys.stderr.flush()
        try:
            write_failure(self._run_folder, self._rank, error)
        except OSError as full:  # the log, or the exit status, has to do
            with contextlib.suppress(OSError):
                print(f"{self._run_folder.failures}: {full}", file=sys.stderr, flush=True)


def run(work: Callable[[StopRequest, Leaving], None], *, run_folder: RunFolder, rank: int) -> int:
    """Do ``work`` as rank ``rank`` of the job in ``run_folder``; returns the exit code.

    Output goes to ``logs/rank-N.log``. An error is left for the starter. The process ends with its starter.
    """
    _log_to(run_folder.rank_log(rank))
    _end_with_parent()
    stop = StopRequest()
    stop.listen()
    leave = Leaving(run_folder, rank)
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
    return 0


def _log_to(path: Path) -> None:
    """Send standard output and error of this process, native code included, to ``path``."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the starter dies; elsewhere than on Linux the starter's own clean-up has to do."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)
