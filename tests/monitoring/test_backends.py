"""Real jobs of every backend tell Prometheus the same, and learn what they learn without it."""

import json
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ports import held_port

BACKENDS = {"ddp": "torch", "horovod": "horovod", "deepspeed": "deepspeed", "fleet": "paddle"}
ALWAYS = {"job_info", "restarts_total", "hosts", "ranks", "update", "total_updates", "epoch", "loss", "learning_rate"}
ALWAYS |= {
    "gradient_norm",
    "samples_per_second",
    "update_seconds",
    "data_wait_share",
    "skipped_updates",
    "memory_bytes",
}
ALWAYS |= {"communication_share", "seconds_since_update", "job_failed", "hangs"}
SPEC = {
    "_BASE_": "digits",
    "model": {"options": {"autoanchor": False}},
    "data": {"image_size": 64, "workers": 1},
    "train": {"epochs": None, "updates": 8, "batch_size": 4},
    "evaluate": {"enabled": False},
    "cluster": {"threads": 1, "nproc_per_node": 2},
    "report": {"plots": False, "tensorboard": False},
}


def start(folder: Path, name: str, *words: str) -> "subprocess.Popen[str]":
    (folder / "mtrain.yml").write_text(json.dumps(SPEC))
    argv = [sys.executable, "-m", "mtrain", "train", "--name", name, *words]
    return subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: "subprocess.Popen[str]", run: Path) -> str:
    """Digest of the weights of a job, once it has ended well."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return str(json.loads((run / "summary.json").read_text())["weights_sha256"])


def names(port: int) -> set[str]:
    """Names of what is told now; none while nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return set()
    return {line.partition("{")[0].removeprefix("mtrain_") for line in lines if not line.startswith("#")}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_tells_the_same_and_learns_the_same_bits(tmp_path, backend):
    if find_spec(BACKENDS[backend]) is None:
        pytest.skip(f"{BACKENDS[backend]} is not installed")
    port = held_port()
    watched = start(tmp_path, "watched", "--backend", backend, "-o", f"report.metrics_port={port}")
    told: set[str] = set()
    while watched.poll() is None:
        told |= names(port)
        time.sleep(0.1)
    digest = ended(watched, tmp_path / "runs" / "watched")
    assert told - {"checkpoint_update"} == ALWAYS
    assert ended(start(tmp_path, "alone", "--backend", backend), tmp_path / "runs" / "alone") == digest
