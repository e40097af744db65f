"""Measure what a forked process, as a loader's are, does not share with the process that it was copied from."""

import os
from collections.abc import Callable

import psutil


def own_mib(use: Callable[[], None]) -> float:
    """Return the memory that a forked process has for itself after it has called ``use``."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        process = psutil.Process()
        before = process.memory_full_info().uss
        use()
        os.write(write_end, str((process.memory_full_info().uss - before) / (1 << 20)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        return float(stream.read())
