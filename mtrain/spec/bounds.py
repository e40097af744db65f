"""Bounds on the memory that reading a file may take. A small file may hold an enormous amount of data."""

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtrain.errors import DataError

GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the memory limit and use of a container's group of processes, of both versions of control groups."""
SHARE = 0.8
"""Largest share of the available memory that reading may take."""
LEAST_BYTES = 64 << 20
SMALL_BYTES = 1 << 30
FACTOR = 100
"""A file may become ``FACTOR`` times as large when it is read, and ``SMALL_BYTES`` in any case. Images are compressed, so
files of them hardly grow."""


def limit_of(file_bytes: int) -> int:
    """Return the bytes of memory that reading files of this size may take."""
    return min(memory_limit(), max(SMALL_BYTES, FACTOR * file_bytes))


def memory_limit() -> int:
    """Return the bytes of memory that reading anything may take."""
    return max(LEAST_BYTES, int(SHARE * available_bytes()))


@contextmanager
def bounded_reading(what: object, limit: int, *, remedy: str) -> Iterator[None]:
    """Read ``what`` with at most ``limit`` bytes of new memory.

    Raises:
        DataError: It needs more.
    """
    try:
        # Columns that repeat one image, compressed buffers and declared lengths expand a thousand times
        # and more. Without a bound the system ends this process, or another one, for lack of memory.
        with bounded_growth(limit):
            yield
    except MemoryError as error:
        # The traceback holds everything that was read.
        error.__traceback__ = None
        gc.collect()
        raise DataError(too_large(what, limit, remedy=remedy)) from None


def give_back() -> None:
    """Give freed memory back to the system, where the C library is glibc: for once, after something large was read."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        # After a file of 116 MB of annotations a rank keeps 230 MiB without it, and 101 MiB with it.
        trim(0)


def too_large(what: object, limit: int, *, remedy: str) -> str:
    """Return the message for something that needs more than ``limit`` bytes."""
    return f"{what}: reading it takes more than {limit / 2**30:.1f} GiB of memory; {remedy}"


def available_bytes() -> int:
    """Return the bytes that new processes here can use without swapping, within the limit of this process's group."""
    import psutil  # a slow import, which ranks need seldom

    free = int(psutil.virtual_memory().available)
    for limit, used in GROUP_FILES:
        try:
            most, now = Path(limit).read_text(encoding="ascii").strip(), Path(used).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if most.isdecimal():
            free = min(free, max(int(most) - int(now), 0))
    return free


@contextmanager
def bounded_growth(limit_bytes: int) -> Iterator[None]:
    """Let this process allocate no more than ``limit_bytes`` beyond what it has now, while the context lasts.

    A larger allocation fails, as it does where there is no such memory: Python raises ``MemoryError``, a library an error
    of its own. Memory that files are mapped to does not count. Without Linux's ``/proc`` nothing is limited.
    """
    try:
        # The sixth number of statm is that of data and stack, in pages: see proc(5).
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    except (OSError, IndexError, ValueError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + limit_bytes
    known = [value for value in (limit, soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
