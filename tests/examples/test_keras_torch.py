"""A model of Keras 3 with its torch backend trains through ``session.prepare`` on every backend what a plain loop of torch trains."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.script.runs import done, largest_difference, weights

if find_spec("keras") is None:  # not imported: it would take its backend from the caller's environment
    pytest.skip("keras is not installed", allow_module_level=True)
PORT = Path(__file__).parents[2] / "examples/ports/keras_torch"
JOBS = {
    "ddp 1": ("--backend", "ddp", "--nproc-per-node", "1"),
    "ddp 3": ("--backend", "ddp", "--nproc-per-node", "3"),
    "horovod 2": ("--backend", "horovod", "--nproc-per-node", "2"),
    "fsdp 2": ("--backend", "fsdp", "--nproc-per-node", "2"),
    **{
        f"ZeRO {stage} 2": ("--backend", "deepspeed", "-o", f"backend.options.stage={stage}", "--nproc-per-node", "2")
        for stage in (2, 3)
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the port, and with the weights of its plain script."""
    here = tmp_path_factory.mktemp("keras") / "port"
    shutil.copytree(PORT, here, ignore=shutil.ignore_patterns("__pycache__"))
    line = [sys.executable, "plain.py", "--fp64"]
    subprocess.run(line, cwd=here, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return here


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_model_of_keras_trains_on_every_backend_what_the_plain_loop_trains(job, folder):
    name = job.replace(" ", "-")
    done(folder, *JOBS[job], "--name", name, "--seed", "42", "-o", "train.precision=fp64", "port.py", "--fp64")
    plain = {name.replace("/", "_"): value.numpy() for name, value in torch.load(folder / "weights.pt").items()}
    plain = {name: value for name, value in plain.items() if value.dtype == np.float64}
    assert plain.keys() == {
        f"{layer}_{part}" for layer in ("first", "second", "classes") for part in ("kernel", "bias")
    }
    largest = largest_difference(weights(folder, name), plain)
    print(f"Keras 3 on torch, {job}: {largest:.1e}")
    assert largest <= 1e-12
