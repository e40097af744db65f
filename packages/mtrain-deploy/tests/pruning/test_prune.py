"""``mtrain prune`` through the real command line: a smaller network that is used like any other, and refusals."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint import format as checkpoint
from mtrain.core.checkpoint import store
from tests import warm
from tests.starts import starts_processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def mtrain(*arguments: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    process = warm.run(*arguments, cwd=cwd, env=ENVIRONMENT)
    assert process.returncode == status, process.stdout + process.stderr
    return process


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/net``, a few updates of a small transformer."""
    place = tmp_path_factory.mktemp("pruned")
    values = ("train.updates=3", "train.epochs=null", "cluster.threads=1", "report.plots=false", "data.workers=0")
    words = [word for value in values for word in ("-o", value)]
    mtrain("train", "-c", "vit_digits", "-b", "solo", "--nproc-per-node", "1", "--name", "net", *words, cwd=place)
    return place


def test_a_smaller_network_is_scored_trained_and_predicts_like_any_other(folder):
    gone = ("-o", "train.distil.teacher=runs/gone")  # of a run that learned from a teacher, which pruning does not need
    mtrain("prune", "--run", "runs/net", "--target", "0.7", *gone, "-o", "small", cwd=folder)
    report = json.loads((folder / "small/pruned.json").read_text())
    assert report["sizes"]
    weights = ("--weights", "small/weights.safetensors")
    mtrain(
        "evaluate", "-c", "small/spec.yml", *weights, "-o", "report.plots=false", "-o", "train.distil=null", cwd=folder
    )
    more = ("-o", "train.updates=2", "-o", "report.plots=false", "-o", "train.distil=null")
    mtrain("train", "-c", "small/spec.yml", "--name", "more", *more, cwd=folder)
    assert json.loads((folder / "runs/more/summary.json").read_text())["reason"] == "done"


QUICK = (
    "train.epochs=null", "train.precision=fp64", "train.batch_size=8", "optimizer.rule=sgd", "schedule.name=constant",
    "evaluate.enabled=false", "report.plots=false", "report.tensorboard=false", "cluster.threads=1", "data.workers=0",
)  # fmt: skip


def fine_tuned(cwd: Path, name: str, *arguments: str, updates: int, ranks: int = 2) -> checkpoint.Saved:
    """The last checkpoint of a job that goes on from the smaller weights."""
    words = [word for value in (*QUICK, f"train.updates={updates}") for word in ("-o", value)]
    mtrain("train", "-c", "small/spec.yml", "--nproc-per-node", str(ranks), "--name", name, *words, *arguments, cwd=cwd)
    found = store.newest(cwd / "runs" / name / "checkpoints")
    assert found is not None
    return store.load(found)


@pytest.fixture(scope="module")
def alone(folder: Path) -> checkpoint.Saved:
    """Four updates of a smaller network on one rank, in ``runs/alone``; its first two are in ``runs/half``."""
    if not (folder / "small").exists():
        mtrain("prune", "--run", "runs/net", "--target", "0.7", "-o", "small", cwd=folder)
    fine_tuned(folder, "half", "-b", "solo", updates=2, ranks=1)
    return fine_tuned(folder, "alone", "-b", "solo", updates=4, ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "horovod", "deepspeed:stage=1", "deepspeed:stage=3", "fleet"])
def test_a_smaller_network_resumes_and_is_exported_on_every_backend(folder, alone, backend):
    name, _, option = backend.partition(":")
    copy = f"on_{name}_{option[-1:]}"
    shutil.copytree(folder / "runs/half", folder / "runs" / copy)
    options = ("-b", name, *(("-o", f"backend.options.{option}") if option else ()))
    mine = fine_tuned(folder, copy, *options, "--resume", f"runs/{copy}", updates=4).state
    largest = 0.0
    for part in ("weights", "ema", "moments"):
        expected, actual = getattr(alone.state, part), getattr(mine, part)
        assert expected.keys() == actual.keys()
        for key, array in expected.items():
            assert actual[key].shape == array.shape, key
            largest = max(largest, np.abs(actual[key] - array).max() / max(np.abs(array).max(), 1e-9))
    print(f"{backend}: largest difference from one rank {largest:.1e}")
    assert largest < 1e-9
    out = f"{copy}.onnx"
    if name == "fleet":
        mtrain("export", "--run", f"runs/{copy}", "--format", "paddle", "--out", copy, cwd=folder)
        out = f"{copy}.pdiparams"
    else:
        mtrain("export", "--run", f"runs/{copy}", "--out", out, cwd=folder)
    assert (folder / out).stat().st_size < 4.2 * sum(array.size for array in mine.weights.values()) + 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "0.5"], "give --run FOLDER"),
        (["--run", "runs/none", "--target", "0.5"], "no such run folder"),
        (["--run", "runs/net", "--target", "0"], "target"),
        (["--checkpoint", "runs/net/spec.yml", "--target", "0.5"], "spec.yml: is no folder"),
    ],
)
def test_what_cannot_be_pruned_is_refused_in_a_sentence(folder, arguments, message):
    process = mtrain("prune", *arguments, "--out", "other", cwd=folder, status=2)
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert not (folder / "other").exists()
