"""Control and measure the memory of this process on its host."""

import ctypes
import os
import re
import resource
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
_SET_BY_CALLER = re.compile(r"^MALLOC_(MMAP_THRESHOLD|TRIM_THRESHOLD|TOP_PAD|MMAP_MAX)_$")
_TUNED_BY_CALLER = re.compile(r"glibc\.malloc\.(mmap_threshold|trim_threshold|top_pad|mmap_max)=")


def keep_memory() -> None:
    """Ask glibc to keep freed memory, because a step on the CPU needs as much as the step before.

    By default glibc returns large blocks to the kernel, which clears them page by page when the next step requests them
    again. This takes a tenth to a quarter of a step of YOLOv5n. What the caller's environment says of these limits stays.
    With another C library the function does nothing.
    """
    # 32 MiB is the largest threshold that glibc accepts.
    _limit({_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20})


def return_memory() -> None:
    """Ask glibc to return freed blocks to the kernel from 1 MiB on, so that a process takes little more than it uses.

    By default glibc raises that size to the largest block freed so far, up to 32 MiB. Smaller ones share a heap, which keeps
    the gaps between blocks that live longer. What the caller's environment says of these limits stays. With another C
    library the function does nothing.
    """
    _limit({_MMAP_THRESHOLD: 1 << 20, _TRIM_THRESHOLD: 1 << 20})


def _limit(limits: dict[int, int]) -> None:
    """Set limits of glibc's malloc, unless the caller's environment has set some."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    is_set = any(map(_SET_BY_CALLER.match, os.environ)) or _TUNED_BY_CALLER.search(os.environ.get("GLIBC_TUNABLES", ""))
    if mallopt is None or is_set:
        return
    for name, value in limits.items():
        mallopt(name, value)


def peak_resident_bytes() -> int:
    """Return the largest size of the resident set that this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
