"""What glibc does with freed memory: in a process of its own, since the limits stay."""

import os
import subprocess
import sys
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

from mtrain.system import memory
from mtrain.system.memory import peak_resident_bytes
from tests.peak_memory import peak_bytes

# Blocks of 8 MiB lie in the heap after keep_memory; glibc counts those that it has from the kernel one by one in `hblks`.
PROGRAM = """
import ctypes, sys
from mtrain.system import memory

class Info(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.mallinfo2.restype = Info
getattr(memory, sys.argv[1])()
libc.free(libc.malloc(16 << 20))  # glibc's own limit is the size of this block from now on
before = libc.mallinfo2().hblks
block = libc.malloc(8 << 20)
print(libc.mallinfo2().hblks - before)
"""
OWN = {"MALLOC_MMAP_THRESHOLD_": "4194304"}
TUNED = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4194304"}


@pytest.mark.job
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("function", "caller", "from_kernel"),
    [
        ("keep_memory", {}, False),
        ("return_memory", {}, True),
        ("keep_memory", OWN, True),
        ("keep_memory", TUNED, True),
        ("return_memory", {"MALLOC_MMAP_THRESHOLD_": "33554432"}, False),
    ],
    ids=["kept", "returned", "kept, with a limit of the caller's", "kept, with a tunable", "returned, with a limit"],
)
def test_a_block_comes_from_the_kernel_or_from_the_heap(
    function: str, caller: dict[str, str], from_kernel: bool
) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", PROGRAM, function]
    done = subprocess.run(command, env=plain | caller, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(int(from_kernel))


@pytest.mark.job
@pytest.mark.smoke
def test_the_peak_of_a_process_is_its_own_and_not_that_of_its_parent() -> None:
    large = np.ones(600 << 17)  # 600 MiB
    code = "from mtrain.system.memory import peak_resident_bytes; print(peak_resident_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < large.nbytes / 2


def test_the_peak_is_what_the_kernel_says_in_bytes() -> None:
    before = peak_bytes()
    # The kernel of many processors counts pages in lots, so that a later figure may be a little lower.
    assert before - memory._UNCOUNTED <= peak_resident_bytes() <= peak_bytes() + memory._UNCOUNTED


def test_a_peak_is_read_again_only_where_it_may_have_moved(monkeypatch):
    seen, told = [1000 << 10], [1000 << 10]
    usage = lambda who: SimpleNamespace(ru_maxrss=seen[0] >> 10)  # noqa: E731
    monkeypatch.setattr(memory.resource, "getrusage", usage)
    reads = []
    monkeypatch.setattr(memory, "_peak_since", lru_cache(maxsize=1)(lambda usage: reads.append(usage) or told[0]))
    assert [memory.peak_resident_bytes() for _ in range(3)] == [1000 << 10] * 3
    assert len(reads) == 1
    seen[0] = told[0] = 9000 << 10
    assert memory.peak_resident_bytes() == 9000 << 10
    seen[0] = 90 << 20  # that of the process which has started this one
    reads.clear()
    told[0] = 10 << 20
    memory.peak_resident_bytes()
    told[0] = 11 << 20
    assert memory.peak_resident_bytes() == 11 << 20
