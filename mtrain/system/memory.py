"""Control and measure the memory of this process on its host."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of glibc's malloc.h."""
_LARGEST_THRESHOLD = 32 << 20
"""The largest value that glibc accepts."""
_RETURNED, _RETURNED_WHILE_BUILT = 1 << 20, 128 << 10
"""Sizes from which freed blocks are returned, in bytes: while a job runs, and while a model is built."""
_SET_BY_CALLER = re.compile(r"^MALLOC_(MMAP_THRESHOLD|TRIM_THRESHOLD|TOP_PAD|MMAP_MAX)_$")
_TUNED_BY_CALLER = re.compile(r"glibc\.malloc\.(mmap_threshold|trim_threshold|top_pad|mmap_max)=")

_UNCOUNTED = 4 << 20
"""Pages that a kernel of many processors may not have counted yet, in bytes."""


def keep_memory() -> None:
    """Ask glibc to keep freed memory, because a step on the CPU needs as much as the step before.

    What the caller's environment says of these limits stays. With another C library the function does nothing.
    """
    # By default glibc returns large blocks to the kernel, which clears them page by page when the next step requests them
    # again. This takes a tenth to a quarter of a step of YOLOv5n.
    _limit(mmap=_LARGEST_THRESHOLD, trim=(1 << 31) - 1, pad=64 << 20)


def return_memory() -> None:
    """Ask glibc to return freed blocks to the kernel from 1 MiB on, so that a process takes little more than it uses.

    What the caller's environment says of these limits stays. With another C library the function does nothing.
    """
    # By default glibc raises that size to the largest block freed so far, up to 32 MiB. Smaller ones share a heap, which keeps
    # the gaps between blocks that live longer.
    _limit(mmap=_RETURNED, trim=_RETURNED, pad=_RETURNED)


@contextmanager
def returned_memory(*, keep: bool) -> Iterator[None]:
    """Have glibc return every larger piece of memory to the kernel as soon as it is freed, while inside.

    Between pieces that stay, others are freed that the next ones do not fit into, so a process that keeps what is freed grows
    by far more than it holds at a time.

    Args:
        keep: Whether ``keep_memory`` is to hold afterwards, or ``return_memory``.
    """
    _limit(mmap=_RETURNED_WHILE_BUILT, trim=_RETURNED_WHILE_BUILT, pad=_RETURNED_WHILE_BUILT)
    try:
        yield
    finally:
        (keep_memory if keep else return_memory)()


def _limit(*, mmap: int, trim: int, pad: int) -> None:
    """Set limits of glibc's malloc, unless the caller's environment has set some."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    is_set = any(map(_SET_BY_CALLER.match, os.environ)) or _TUNED_BY_CALLER.search(os.environ.get("GLIBC_TUNABLES", ""))
    if mallopt is None or is_set:
        return
    for name, value in ((_MMAP_THRESHOLD, mmap), (_TRIM_THRESHOLD, trim), (_TOP_PAD, pad)):
        mallopt(name, value)


def peak_resident_bytes() -> int:
    """Return the largest size of the resident set that this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    seen = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peak = _peak_since(seen)
    # Linux's ``ru_maxrss`` is not below the size of the process that has started this one, so it tells that the peak has not moved only
    # where it is that peak, but for pages that the kernel has not counted yet.
    return peak if abs(seen - peak) <= _UNCOUNTED else _peak_since.__wrapped__(seen)


@lru_cache(maxsize=1)
def _peak_since(seen: int) -> int:
    """Read the peak from the kernel, anew whenever ``seen`` has moved: a record asks for it, and to open a file takes longest there."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            return int(file.read().partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024
    except (OSError, IndexError):
        return seen
