"""Memory of this process on its host."""

import ctypes
import resource
import sys


def keep_memory() -> None:
    """Ask glibc to keep what is freed: the tensors of a step on CPU are as large as those of the step before.

    By default it returns big blocks to the kernel, which clears them page by page when the next step asks again: a tenth to
    a quarter of YOLOv5n's step. Nothing happens with another C library.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 << 20)  # the largest that glibc takes
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(top_pad, 64 << 20)


def peak_resident_bytes() -> int:
    """The largest resident set that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
