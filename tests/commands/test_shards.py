"""``cluster.shards`` through the real command line: a rank may compute several shards, and the result stays the same."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint import store
from tests import warm
from tests.starts import starts_processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
QUICK = (
    "train.epochs=null", "train.updates=4", "data.workers=0", "train.batch_size=12", "train.accumulate=2", "train.clip_norm=1",
    "train.precision=fp64", "train.ema={decay: 0.9, ramp: 4}", "schedule.warmup.updates=16", "optimizer.learning_rate=0.002",
    "data.image_size=64", "evaluate.enabled=false", "report.tensorboard=false", "report.plots=false", "cluster.threads=1",
    "cluster.shards=3",
)  # fmt: skip
"""Options of a short job; at the full learning rate from its first update on, AdamW would make rounding a thousand times larger."""


def mtrain(*arguments: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    process = warm.run(*arguments, cwd=cwd, env=ENVIRONMENT)
    assert process.returncode == status, process.stdout + process.stderr
    return process


def train(cwd: Path, name: str, *values: str, backend: str = "ddp", ranks: int, status: int = 0):
    overrides = [word for value in (*QUICK, *values) for word in ("-o", value)]
    arguments = ["-c", "digits", "-b", backend, "--nproc-per-node", str(ranks), "--name", name]
    return mtrain("train", *arguments, *overrides, cwd=cwd, status=status)


def arrays(cwd: Path, name: str) -> dict[str, np.ndarray]:
    """Weights with buffers, averages and moments of the last checkpoint, by part and name."""
    found = store.newest(cwd / "runs" / name / "checkpoints")
    assert found is not None
    state = store.load(found).state
    parts = {"weights": state.weights, "ema": state.ema, "moments": state.moments}
    return {f"{part}/{key}": np.float64(x) for part, values in parts.items() for key, x in values.items()}


def furthest(cwd: Path, name: str, reference: str = "three") -> float:
    """Return the largest difference to the job ``reference``, relative to each array's largest value."""
    three, other = arrays(cwd, reference), arrays(cwd, name)
    assert three.keys() == other.keys()
    assert any("running_mean" in key for key in three)
    return max(float(np.abs(x - other[key]).max() / max(np.abs(x).max(), 1e-9)) for key, x in three.items())


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job of three shards on three ranks, ``runs/three``."""
    folder = tmp_path_factory.mktemp("shards")
    train(folder, "three", ranks=3)
    return folder


@pytest.mark.parametrize(
    ("backend", "ranks", "options", "limit"),
    [
        ("ddp", 2, (), 1e-10),
        ("ddp", 1, (), 1e-10),
        ("fleet", 2, (), 1e-8),
        pytest.param("ddp", 4, (), 1e-10, marks=pytest.mark.slow),
        pytest.param("horovod", 2, (), 1e-10, marks=pytest.mark.slow),
        pytest.param("deepspeed", 2, ("backend.options.stage=1",), 1e-10, marks=pytest.mark.slow),
        pytest.param("deepspeed", 2, ("backend.options.stage=3",), 1e-10, marks=pytest.mark.slow),
    ],
)
def test_three_shards_make_the_same_job_on_other_numbers_of_ranks(folder, backend, ranks, options, limit):
    name = f"{backend}-{ranks}-{''.join(options)[-1:]}"
    train(folder, name, *options, backend=backend, ranks=ranks)
    difference = furthest(folder, name)
    print(f"{backend} {' '.join(options)} x {ranks}: largest difference {difference:.1e}")
    assert difference < limit


def test_without_fixed_shards_another_number_of_ranks_is_another_job(folder):
    train(folder, "ranks", "cluster.shards=null", ranks=2)
    assert furthest(folder, "ranks") > 1e-6


@pytest.mark.slow
def test_ranges_of_inputs_are_those_of_all_shards_in_turn(folder):
    """Two updates: rounding to 8 bits makes whole steps of the last bit in later ones."""
    values = ("train.quantise.start=0", "train.updates=2")
    train(folder, "rounded-three", *values, ranks=3)
    train(folder, "rounded", *values, ranks=2)
    assert any("input_range" in key for key in arrays(folder, "rounded"))
    assert furthest(folder, "rounded", "rounded-three") < 1e-10


def test_models_and_options_that_need_all_shards_at_once_are_refused_by_the_plan(folder):
    process = train(folder, "x", "train.sync_batchnorm=true", ranks=2, status=2)
    assert "train.sync_batchnorm: it normalises over all shards" in process.stderr
    process = train(folder, "x", "model.name=ppyoloe_s", "model.options={}", ranks=2, status=2)
    assert "model.name: the loss of ppyoloe_s is divided by a sum over all shards" in process.stderr
