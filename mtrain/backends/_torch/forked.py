"""Ranks as copies of one process that has imported torch and the program of a rank, so that a host imports them once.

Only on Linux and where no GPU is visible: what a library keeps for a GPU's driver does not survive a fork.
"""

import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from mtrain.spec import collector
from mtrain.system.ending import end_with
from mtrain.system.placement import count_devices

PASSED_ON = (signal.SIGTERM, signal.SIGINT)
"""Signals that the starter handles, and a rank not before it says so."""

NEEDED = (
    *("torch", "torch.distributed.nn.functional"),
    *("mtrain.backends._torch.nn", "mtrain.backends._torch.ddp_engine", "mtrain.backends._torch.group"),
)
"""Modules that most ranks import."""


class ForkedRank:
    """A rank that runs as a copy of this process; has the part of ``subprocess.Popen`` that a starter needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the rank runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM, unless the rank has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the rank has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        # Until waitpid has taken the status, the number belongs to this rank and to no other process.
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def program(name: str, words: Sequence[str]) -> ModuleType | None:
    """Import torch and module ``name`` for ranks that are copies of this process and have arguments ``words``.

    Returns:
        The module; None if ranks must be processes of their own, which then also report what cannot be imported, or
        because the module says so by ``OWN_PROCESSES`` or its function ``may_be_copied``.
    """
    # A recorder of mtrain-trace belongs to the process that has imported torch.
    if sys.platform != "linux" or "MTRAIN_TRACE" in os.environ or count_devices(os.environ) or not _can_be_shown():
        return None
    try:
        with collector.paused():
            module = import_module(name)
            if not callable(getattr(module, "main", None)) or getattr(module, "OWN_PROCESSES", False):
                return None
            if not getattr(module, "may_be_copied", lambda words: True)(words):
                return None
            for part in NEEDED:
                import_module(part)
    except Exception:
        return None
    collector.keep_all()  # a collection would also write to every object, and so copy the memory that the ranks share
    return module


def start(module: ModuleType, words: Sequence[str], variables: Mapping[str, str]) -> ForkedRank:
    """Start ``module.main(words)`` in a copy of this process, which ends with what it returns.

    The copy has ``variables`` in its environment, and otherwise what a new process has: signals act as by default, numpy's
    generator is seeded anew, and output is not buffered.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that came in between would be handled by the copy as if it were the starter.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pid = os.fork()
    if pid == 0:
        for number in PASSED_ON:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        _become(module, words, variables)
        main: Callable[[Sequence[str]], int] = module.main
        end_with(lambda: main(words))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    return ForkedRank(pid)


def _become(module: ModuleType, words: Sequence[str], variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    sys.argv = [str(module.__file__), *words]
    sys.stdout = io.TextIOWrapper(
        os.fdopen(1, "wb", 0, closefd=False),
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        write_through=True,
    )
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    with suppress(OSError, IndexError, ValueError):
        _show_as([sys.executable, "-u", "-m", module.__name__, *words])


def _show_as(words: Sequence[str]) -> None:
    """Show ``words`` as the command line of this process, in ``ps`` and to programs that look for ranks.

    Raises:
        OSError: The kernel does not allow it.
        ValueError: They are longer than the command line with which the process was started.
    """
    _write_line(b"".join(os.fsencode(word) + b"\0" for word in words))


def _can_be_shown() -> bool:
    """Return whether the kernel lets this process write its command line; hardened ones do not."""
    try:
        _write_line(Path("/proc/self/cmdline").read_bytes())
    except (OSError, IndexError, ValueError):
        return False
    return True


def _write_line(line: bytes) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    if len(line) > end - first:
        raise ValueError(f"{len(line)} bytes given; expected at most {end - first}")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(first)
        memory.write(line.ljust(end - first, b"\0"))
