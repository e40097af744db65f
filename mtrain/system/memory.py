"""Control and measure the memory of this process on its host."""

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of glibc's malloc.h."""
_RETURNED_BYTES = 128 << 10
_LARGEST_THRESHOLD = 32 << 20
"""The largest value that glibc accepts."""


def keep_memory() -> None:
    """Ask glibc to keep freed memory, because a step on the CPU needs as much as the step before.

    By default glibc returns large blocks to the kernel, which clears them page by page when the next step requests them
    again. This takes a tenth to a quarter of a step of YOLOv5n. With another C library the function does nothing.
    """
    _set_thresholds(trim=(1 << 31) - 1, pad=64 << 20, mmap=_LARGEST_THRESHOLD)


@contextmanager
def returned_memory(*, keep: bool) -> Iterator[None]:
    """Have glibc return every larger piece of memory to the kernel as soon as it is freed, while inside.

    Between pieces that stay, others are freed that the next ones do not fit into, so a process that keeps what is freed grows
    by far more than it holds at a time.

    Args:
        keep: Whether ``keep_memory`` is to hold afterwards.
    """
    _set_thresholds(trim=_RETURNED_BYTES, pad=_RETURNED_BYTES, mmap=_RETURNED_BYTES)
    try:
        yield
    finally:
        if keep:
            keep_memory()
        else:  # where glibc's own adjustment ends once large pieces were freed
            _set_thresholds(trim=2 * _LARGEST_THRESHOLD, pad=_RETURNED_BYTES, mmap=_LARGEST_THRESHOLD)


def _set_thresholds(*, trim: int, pad: int, mmap: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, mmap)
        mallopt(_TRIM_THRESHOLD, trim)
        mallopt(_TOP_PAD, pad)


def peak_resident_bytes() -> int:
    """Return the largest size of the resident set that this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
