"""Run the ports of Horovod's TensorFlow examples in the environment of TensorFlow, and read what they have trained."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).parents[4]
PORTS = ROOT / "examples/ports"
PYTHON = ROOT / ".venv-tf/bin/python"
"""The interpreter that `make test-others` makes: TensorFlow, Horovod for it, numpy 1, and no torch."""
needs_tensorflow = pytest.mark.skipif(
    not PYTHON.exists(), reason="there is no environment .venv-tf: `make test-others` makes it"
)
QUIET = ("report.plots=false", "report.tensorboard=false", "cluster.threads=1", f"backend.python={PYTHON}")


def command(script: Path, ranks: int, *words: str, arguments: tuple[str, ...] = ("--fp64",)) -> list[str]:
    """Return the command line of a job."""
    line = [sys.executable, "-m", "mtrain", "run", "-o", *QUIET, "--backend", "horovod", "--nproc-per-node", str(ranks)]
    return [*line, *words, str(script), *arguments]


def environment() -> dict[str, str]:
    """Return the environment of a job: the interpreter of TensorFlow takes mtrain from this checkout too."""
    places = [ROOT, *(ROOT / "packages" / package / "src" for package in ("mtrain-trace", "mtrain-tensorflow"))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "TF_CPP_MIN_LOG_LEVEL": "2"}


def run(here: Path, script: Path, ranks: int, *words: str, arguments: tuple[str, ...] = ("--fp64",)):
    """Run a job in a folder, which is made."""
    here.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        command(script, ranks, *words, arguments=arguments),
        cwd=here, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def weights(here: Path) -> dict[str, np.ndarray]:
    """Return the weights that rank 0 of a port has written."""
    with np.load(here / "weights.npz") as file:
        return {name: file[name] for name in file.files}


def trained(here: Path, script: Path, ranks: int, *words: str) -> dict[str, np.ndarray]:
    """Run a job and return its weights."""
    result = run(here, script, ranks, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    return weights(here)


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Return the largest difference between arrays of the same names."""
    assert one.keys() == other.keys()
    assert all(one[name].dtype == np.float64 for name in one)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def started(
    here: Path, script: Path, ranks: int, *words: str, until: str, arguments: tuple[str, ...] = ("--fp64",)
) -> "subprocess.Popen[str]":
    """Start a job, and return once a file matches the pattern ``until``."""
    here.mkdir(parents=True, exist_ok=True)
    with (here / "first.log").open("w") as log:
        job = subprocess.Popen(
            command(script, ranks, *words, arguments=arguments),
            cwd=here,
            env=environment(),
            stdout=log,
            stderr=log,
            text=True,
        )
    deadline = time.monotonic() + 240
    while not list(here.glob(until)):
        assert job.poll() is None, (here / "first.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return job


def kill_all(job: "subprocess.Popen[str]") -> None:
    """End all processes of a job at once with SIGKILL."""
    processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)  # else one might see another end, and save
    for process in processes:
        process.kill()
    job.wait(60)
    psutil.wait_procs(processes, timeout=60)


def records(here: Path, name: str) -> list[dict]:
    """Return the records of a run."""
    return [json.loads(line) for line in (here / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def read_by_numpy(file: Path) -> dict[str, np.ndarray]:
    """Read a file of arrays with nothing but numpy: a length, a table in JSON, the bytes."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    table = json.loads(content[8 : 8 + size])
    types = {"F64": np.float64, "F32": np.float32, "I64": np.int64}
    found = {}
    for name, entry in table.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            raw = content[8 + size + begin : 8 + size + end]
            found[name] = np.frombuffer(raw, types[entry["dtype"]]).reshape(entry["shape"])
    return found
