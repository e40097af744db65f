"""However a file of a few megabytes is made, reading it takes memory in proportion to its bytes, or ends in one line."""

import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest

from mtrain.weights.reading import read
from tests.weights.test_files import zipped

SIZE_BYTES = 4 * 2**20


def many_names(dtype, count=1000):
    """One array under ``count`` names."""
    buffer = np.zeros(SIZE_BYTES // np.dtype(dtype).itemsize, dtype)
    return {f"w{i}": buffer for i in range(count)}


def cut(content, count=1000):
    """Paddle's record that each of ``count`` arrays was cut into one slice, all of them the same bytes."""
    slices = {f"joined{i}": {"OriginShape": (SIZE_BYTES // 4,), "slices": [f"w{i}"]} for i in range(count)}
    return {**content, "UnpackBigParamInfor@@": slices}


def torch_bfloat16(count=1000):
    """A zip of torch: ``count`` transposed views of one storage of bfloat16."""
    length = SIZE_BYTES // 2
    storage = b"(X\x07\0\0\0storagectorch\nBFloat16Storage\nX\x01\0\0\x000X\x03\0\0\0cpuJ" + struct.pack("<i", length)
    one = (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"tQK\x00J"
        + struct.pack("<i", length)
        + b"\x85K\x01\x85\x89NtR"
    )
    first = b"X\x06\0\0\x00000000" + one + b"q\x01"
    others = b"".join(b"X\x06\0\0\0" + f"{i:06}".encode() + b"h\x01" for i in range(1, count))
    return zipped({"a/data.pkl": b"\x80\x02}(" + first + others + b"u.", "a/data/0": bytes(SIZE_BYTES)})


def modules_in_modules():
    """Module 0 holds module 1 a hundred times, which holds module 2 a hundred times, and so on."""
    parts = [b"\x80\x02"]
    for level in range(8):
        inside = b"".join(
            b"X\x02\0\0\0" + f"{i:02}".encode() + b"h" + bytes([level - 1]) for i in range(100 if level else 0)
        )
        parts.append(b"cmodels.yolo\nModel\n)\x81}X\x08\0\0\0_modules}(" + inside + b"usbq" + bytes([level]))
    return b"".join(parts) + b"."


SHARED = "would take 8,000 MiB of memory, but the file has 4.0 MiB"
BOMBS = {
    "Paddle's bfloat16, widened one by one": (lambda: pickle.dumps(many_names(np.uint16), protocol=4), SHARED),
    "slices, joined one by one": (
        lambda: pickle.dumps(cut(many_names(np.float32)), protocol=4),
        "would take 4,000 MiB",
    ),
    "the same below a key": (lambda: pickle.dumps({"model": many_names(np.uint16)}, protocol=4), SHARED),
    "torch's bfloat16": (torch_bfloat16, SHARED),
    "a pickle of empty lists": (lambda: b"\x80\x02(" + b"]" * SIZE_BYTES + b"l.", "more than 1,000,000 instructions"),
    "modules in modules": (modules_in_modules, "modules with more than 200000 entries"),
}
"""Kind -> what makes the file, and what is told."""
LIMITED = """
import resource, sys
from pathlib import Path
from mtrain.errors import CheckpointError
from mtrain.weights.reading import read
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for name in sys.argv[1:]:
    try:
        read(Path(name))
    except CheckpointError as error:
        print(str(error).replace(chr(10), " / "))
    else:
        print(name, "was read")
"""


@pytest.mark.smoke
@pytest.mark.job
def test_files_of_4_MB_cannot_take_a_gigabyte(tmp_path):
    names = [f"{i}.bomb" for i in range(len(BOMBS))]
    for name, (made, _) in zip(names, BOMBS.values(), strict=True):
        (tmp_path / name).write_bytes(made())
        assert (tmp_path / name).stat().st_size < 5 * 2**20
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", LIMITED, *names]
    process = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == len(BOMBS)
    for name, line, (_, told) in zip(names, lines, BOMBS.values(), strict=True):
        assert line.startswith(f"{name}: refused, nothing of it was executed: ")
        assert told in line


def test_arrays_that_share_their_bytes_a_few_times_are_read(tmp_path):
    tied = np.arange(2**18, dtype=np.float32)
    (tmp_path / "w").write_bytes(pickle.dumps({"embedding": tied, "output": tied, "copy": tied}, protocol=4))
    assert {name: array.size for name, array in read(tmp_path / "w").arrays.items()} == dict.fromkeys(
        ("embedding", "output", "copy"), 2**18
    )


@pytest.mark.job
def test_a_file_larger_than_the_memory_is_one_line_and_exit_code_2(tmp_path):
    with open(tmp_path / "w.pt", "wb") as file:
        file.truncate(2**40)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30));"
        "from mtrain.commands import main; sys.exit(main(['weights', 'show', 'w.pt']))"
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert process.returncode == 2, process.stderr
    assert process.stderr == "error: w.pt: too large for the memory of this process (1,048,576 MiB)\n"
