"""Read and print what others have written: regular files alone, up to a size, and text that no terminal obeys."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MAX_BYTES = 32 << 20
"""Largest file of facts, and longest line of a file of records, in bytes."""
MAX_MEMORY_BYTES = 1536 << 20
"""Most memory that the records of a training may take, beyond what this process holds when it begins to read them."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, marks that reverse the order of characters, and halves of characters."""


class TraceError(Exception):
    """A folder that cannot be compared; its message says what is wrong and what to do."""


class CannotTell(TraceError):
    """Nothing can be said about two trainings: one of them is broken, too large, or has nothing that the other one has too."""


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading; a named pipe would wait for ever, and a device may never end.

    Raises:
        CannotTell: it is missing, unreadable, or not a regular file.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe waits until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CannotTell(f"{path}: {getattr(error, 'strerror', None) or error}; record the training again") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CannotTell(f"{path}: is no regular file; expected one that mtrain-trace has written")
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file of JSON holds.

    Raises:
        CannotTell: there is none, or it is too large.
    """
    with open_file(path) as file:
        return _parse(path, file.read(MAX_BYTES + 1))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, if there is one; the last line of a process that was killed may be incomplete.

    Raises:
        CannotTell: a line is no object of JSON or too long, or the records take too much memory.
    """
    if not os.path.lexists(path):
        return
    with open_file(path) as file:
        read = 0
        while line := file.readline(MAX_BYTES + 1):
            read += len(line)
            # Asking the kernel costs a system call, which a line of a few kilobytes is not worth.
            if read > MAX_BYTES // 8:
                read = 0
                check_memory(path)
            if line.endswith(b"\n") or len(line) > MAX_BYTES:
                yield _parse(path, line)


def begin_training() -> None:
    """Count memory from here on: what is read next belongs to another training."""
    global _held_before
    _held_before = _held_bytes()


def _held_bytes() -> int:
    """Return the size of the resident set; 0 without Linux's ``/proc``, where nothing is limited."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


_held_before = 0


def check_memory(path: Path) -> None:
    """Raise ``CannotTell`` if what was read of a training takes too much memory."""
    if _held_bytes() - _held_before > MAX_MEMORY_BYTES:
        raise CannotTell(
            f"{path}: comparing it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory; record fewer updates (--updates 100)"
        )


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    if len(content) > MAX_BYTES:
        raise CannotTell(f"{path}: more than {MAX_BYTES >> 20} MiB at once; expected what mtrain-trace has written")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CannotTell(f"{path}: is no JSON ({str(error)[:200]}); record the training again") from error
    if not isinstance(value, dict):
        raise CannotTell(f"{path}: holds {type(value).__name__} where an object is expected; record the training again")
    return value


def printable(text: str) -> str:
    r"""Return text whose control characters are written as ``\u001b``."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: str, *, file: IO[str] | None = None) -> None:
    """Print text that may hold anything."""
    print(printable(text), file=file or sys.stdout, flush=True)
