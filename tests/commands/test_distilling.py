"""``train.distil`` through the real command line: a teacher is imitated, the same on every backend, and refused where it cannot be."""

import json
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
    "train.epochs=null", "train.updates=6", "data.workers=0", "train.batch_size=8", "train.precision=fp64", "train.seed=3",
    "schedule.name=constant", "evaluate.enabled=false", "report.tensorboard=false", "report.plots=false", "cluster.threads=1",
    "model.options.label_smoothing=0",
)  # fmt: skip
STUDENT = ("model.options.width=32", "model.options.depth=1", "model.options.dropout=0.1")


def mtrain(*arguments: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    process = warm.run(*arguments, cwd=cwd, env=ENVIRONMENT)
    assert process.returncode == status, process.stdout + process.stderr
    return process


def train(
    cwd: Path,
    name: str,
    *values: str,
    backend: str = "solo",
    ranks: int = 1,
    status: int = 0,
    more: tuple[str, ...] = (),
):
    overrides = [word for value in (*QUICK, *values) for word in ("-o", value)]
    arguments = ["-c", "vit_digits", "-b", backend, "--nproc-per-node", str(ranks), "--name", name, *more]
    return mtrain("train", *arguments, *overrides, cwd=cwd, status=status)


def state(cwd: Path, name: str):
    found = store.newest(cwd / "runs" / name / "checkpoints")
    assert found is not None
    return store.load(found)


def losses(cwd: Path, name: str, which: str) -> list[float]:
    rows = [json.loads(line) for line in (cwd / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row["losses"][which] for row in rows if row["kind"] == "update"]


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher, ``runs/teacher``, and its student on one rank, ``runs/one``."""
    folder = tmp_path_factory.mktemp("distilled")
    train(folder, "teacher")
    train(folder, "one", *STUDENT, "train.distil={teacher: runs/teacher, temperature: 2}")
    return folder


def furthest(folder: Path, name: str) -> float:
    """Return the largest difference of weights, averages and moments to those of ``one``, relative to each array's largest."""
    one, other = state(folder, "one").state, state(folder, name).state
    differences = []
    for part in ("weights", "ema", "moments"):
        mine, theirs = getattr(one, part), getattr(other, part)
        assert set(mine) == set(theirs)
        assert mine
        differences += [np.abs(mine[key] - theirs[key]).max() / max(np.abs(mine[key]).max(), 1e-9) for key in mine]
    return float(max(differences))


def test_the_teacher_counts_in_the_loss_and_is_no_part_of_the_checkpoint(folder):
    taught, teacher = state(folder, "one"), state(folder, "teacher")
    assert min(losses(folder, "one", "distil")) > 0
    assert set(taught.state.weights) < set(teacher.state.weights)  # the student has fewer blocks of the same kind
    assert len(taught.meta["extra"]["teacher"]) == 64


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("ddp", 2),
        ("fleet", 2),
        pytest.param("horovod", 2, marks=pytest.mark.slow),
        pytest.param("deepspeed", 2, marks=pytest.mark.slow),
    ],
)
def test_every_backend_learns_the_same_from_a_teacher(folder, backend, ranks):
    train(
        folder, backend, *STUDENT, "train.distil={teacher: runs/teacher, temperature: 2}", backend=backend, ranks=ranks
    )
    difference = furthest(folder, backend)
    print(f"{backend} x {ranks}: largest difference {difference:.1e}")
    assert difference < 1e-9


@pytest.mark.slow
def test_zero_3_learns_the_same_from_a_teacher(folder):
    values = ("train.distil={teacher: runs/teacher, temperature: 2}", "backend.options.stage=3")
    train(folder, "zero3", *STUDENT, *values, backend="deepspeed", ranks=2)
    assert furthest(folder, "zero3") < 1e-9


def test_a_resumed_job_learns_what_an_undisturbed_one_does(folder):
    distil = "train.distil={teacher: runs/teacher, temperature: 2}"
    train(folder, "parts", *STUDENT, distil, "train.updates=3")
    train(folder, "parts", *STUDENT, distil, more=("--resume", "runs/parts"))
    assert losses(folder, "parts", "total") == losses(folder, "one", "total")
    assert furthest(folder, "parts") == 0


def test_weights_in_a_file_need_the_model_that_they_are_of(folder):
    mtrain("weights", "export", "runs/teacher", "--to", "teacher.safetensors", cwd=folder)
    process = train(folder, "x", *STUDENT, "train.distil.teacher=teacher.safetensors", status=2)
    assert "train.distil.model" in process.stderr
    options = "{patch: 2, width: 64, depth: 4, heads: 4}"
    distil = f"train.distil={{teacher: teacher.safetensors, model: vit, options: {options}, temperature: 2}}"
    train(folder, "file", *STUDENT, distil)
    assert furthest(folder, "file") < 1e-5  # the file has float32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["train.distil.outputs=2"], "train.distil.teacher: missing; name a run folder"),
        (["train.distil.teacher=runs/none"], "train.distil.teacher: runs/none: no such file or folder"),
        (["train.distil.teacher=broken.safetensors"], "train.distil.teacher: broken.safetensors: not a file of weights"),
        (["train.distil={teacher: runs/teacher, features: 1}"], "train.distil.features: 1 given, but vit as student can share its outputs"),
        (["train.distil={teacher: runs/teacher, outputs: 0}"], "nothing is imitated"),
        (["train.distil={teacher: runs/teacher, options: {width: 3}}"], "options are given without model"),
        (["train.distil={teacher: runs/teacher, model: yolov5n}"], "yolov5n is for detection, but model.name: vit is for classification"),
        (["train.distil={teacher: runs/teacher, model: vit, options: {patch: 4}}"], "train.distil.teacher: "),
        (["train.distil={teacher: runs/teacher}", "data.image_size=16"], "train.distil.teacher: "),
        (["train.distil={teacher: runs/teacher}", "data.names=[3,1,2,0,4,5,6,7,8,9]"], "was trained for 10 classes (0, 1, 2, ...)"),
    ],
)  # fmt: skip
def test_a_teacher_of_no_use_is_refused_before_any_rank_starts(folder, values, message):
    (folder / "broken.safetensors").write_bytes(b"nothing of the kind")
    process = train(folder, "refused", *STUDENT, *values, status=2)
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert not (folder / "runs/refused").exists()
