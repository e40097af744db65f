"""Control and measure the memory of this process on its host."""

import ctypes
import resource
import sys
from pathlib import Path

GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the memory limit and use of a container's group of processes, of both versions of control groups."""


def keep_memory() -> None:
    """Ask glibc to keep freed memory, because a step on the CPU needs as much as the step before.

    By default glibc returns large blocks to the kernel, which clears them page by page when the next step requests them
    again. This takes a tenth to a quarter of a step of YOLOv5n. With another C library the function does nothing.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 << 20)  # the largest value that glibc accepts
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 64 << 20)


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


def peak_resident_bytes() -> int:
    """Return the largest size of the resident set that this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
