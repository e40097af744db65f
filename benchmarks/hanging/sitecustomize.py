"""Lets a process hang in the middle of whatever it does when it gets a signal: on PYTHONPATH, in ranks of any training.

The file $HANG_ORDER names the hang, and a FIFO into which nobody writes.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

SIGNAL = int(signal.SIGRTMIN) + 9


def spin(fifo: str) -> None:
    """Run an endless loop of Python."""
    while True:
        pass


def sleep(fifo: str) -> None:
    """Sleep for an hour."""
    time.sleep(3600)


def hold_gil(fifo: str) -> None:
    """Read from a pipe in C without letting the interpreter go. The kernel goes on with that after a signal."""
    reading, _ = os.pipe()
    ctypes.PyDLL(None).read(reading, ctypes.create_string_buffer(1), 1)


def open_fifo(fifo: str) -> None:
    """Open a FIFO that nobody writes to, as a file on a disk that does not answer."""
    Path(fifo).read_bytes()


def ask_person(fifo: str) -> None:
    """Wait for a line that nobody types."""
    sys.stdin = os.fdopen(os.pipe()[0])
    input()


def wait_for_barrier(fifo: str) -> None:
    """Call a barrier where the other ranks exchange gradients."""
    if "horovod.torch" in sys.modules:
        sys.modules["horovod.torch"].barrier()
    elif "paddle" in sys.modules:
        sys.modules["paddle"].distributed.barrier()
    else:
        sys.modules["torch"].distributed.barrier()


def pause(fifo: str) -> None:
    """Sleep for half a minute, as in a callback of a user."""
    time.sleep(30)


def compute(fifo: str) -> None:
    """Compute for three quarters of a minute without a word, as in an evaluation of a user."""
    until, numbers = time.monotonic() + 45, list(range(10_000))
    while time.monotonic() < until:
        numbers.sort(key=lambda number: -number)


HEALTHY = {"pause": pause, "computation": compute}
"""What takes long and is no hang."""
HANGS: dict[str, Callable[[str], None]] = {
    "spin": spin,
    "sleep": sleep,
    "gil": hold_gil,
    "fifo": open_fifo,
    "input": ask_person,
    "barrier": wait_for_barrier,
}


def hang(number: int, frame: object) -> None:
    """Hang as the order says."""
    kind, fifo = Path(os.environ["HANG_ORDER"]).read_text(encoding="utf-8").split()
    {**HANGS, **HEALTHY}[kind](fifo)


signal.signal(SIGNAL, hang)
