"""Control and measure the memory of this process on its host."""

import ctypes
import resource
import sys


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


def peak_resident_bytes() -> int:
    """Return the largest size of the resident set that this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
