"""``mtrain prune`` through the real command line: a smaller network that is used like any other, and refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def mtrain(*arguments: str, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mtrain", *arguments]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert process.returncode == status, process.stdout + process.stderr
    return process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/net``, a few updates of a small transformer."""
    place = tmp_path_factory.mktemp("pruned")
    values = ("train.updates=3", "train.epochs=null", "cluster.threads=1", "report.plots=false", "data.workers=0")
    words = [word for value in values for word in ("-o", value)]
    mtrain("train", "-c", "vit_digits", "-b", "solo", "--nproc-per-node", "1", "--name", "net", *words, cwd=place)
    return place


def test_a_smaller_network_is_scored_trained_and_predicts_like_any_other(folder):
    gone = ("-o", "train.distil.teacher=runs/gone")  # of a run that learned from a teacher, which pruning does not need
    table = ("--sensitivity", "--samples", "5")  # fewer than a micro batch, which is filled up
    process = mtrain("prune", "--run", "runs/net", "--target", "0.7", *table, *gone, "-o", "small", cwd=folder)
    report = json.loads((folder / "small/pruned.json").read_text())
    assert report["sizes"]
    rows = report["sensitivity"]
    assert [row["group"] for row in rows] == [row["group"] for row in report["groups"]]
    assert {row["samples"] for row in rows} == {5}
    assert all(abs(loss * 5 - round(loss * 5)) < 1e-6 for row in rows for loss in row["losses"])  # of 5 pictures
    assert f"sensitivity: {len(rows)} of {len(rows)} groups" in process.stderr
    assert "loss of score on 5 samples" in process.stdout
    weights = ("--weights", "small/weights.safetensors")
    mtrain(
        "evaluate", "-c", "small/spec.yml", *weights, "-o", "report.plots=false", "-o", "train.distil=null", cwd=folder
    )
    more = ("-o", "train.updates=2", "-o", "report.plots=false", "-o", "train.distil=null")
    mtrain("train", "-c", "small/spec.yml", "--name", "more", *more, cwd=folder)
    assert json.loads((folder / "runs/more/summary.json").read_text())["reason"] == "done"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "0.5"], "give --run FOLDER"),
        (["--run", "runs/none", "--target", "0.5"], "no such run folder"),
        (["--run", "runs/net", "--target", "0"], "target"),
    ],
)
def test_what_cannot_be_pruned_is_refused_in_a_sentence(folder, arguments, message):
    process = mtrain("prune", *arguments, "--out", "other", cwd=folder, status=2)
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert not (folder / "other").exists()
