"""The example distributions of plugins: installed, found by name, tested, trained on torch and Paddle, and resumed."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.starts import starts_processes

ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow
PLUGINS = {
    "mtrain-convnext": [("models", "convnext_atto"), ("models", "convnext_small"), ("models", "convnext_tiny")],
    "mtrain-keypoints": [
        ("models", "integral_pose"),
        ("datasets", "coco_keypoints"),
        ("datasets", "stick_figures"),
        ("tasks", "keypoints"),
    ],
    "mtrain-labelme": [("datasets", "labelme_groups")],
    "mtrain-pinned": [("launchers", "pinned")],
    "mtrain-hello": [("commands", "hello")],
}
"""Example -> kind and name of its plugins."""
KIT = "test_it_passes_the_checks_of_mtrain"
SHORT = (
    *("-o", "train.epochs=null", "train.updates=4", "train.batch_size=4", "checkpoint.every_updates=2"),
    *("evaluate.every_epochs=null", "checkpoint.every_epochs=null", "checkpoint.keep_last=4", "data.workers=0"),
    *("report.plots=false", "report.tensorboard=false", "cluster.threads=1", "cluster.nproc_per_node=2"),
)
JOBS: dict[str, Sequence[str]] = {
    "mtrain-convnext": (
        *("-c", "vit_digits", "-o", "model.name=convnext_atto", "data.image_size=32"),
        *("model.options.drop_path=0.2", "model.options.layer_scale=0.1", "evaluate.enabled=false"),
    ),
    "mtrain-keypoints": (
        *("-c", str(ROOT / "examples" / "mtrain-keypoints" / "stick_figures.yml")),
        *("-o", "data.format=coco_keypoints", "data.root=made"),
    ),
    "mtrain-labelme": ("-c", "yolov5n", "-o", "data.format=labelme_groups", "data.root=made", "data.image_size=64"),
}
"""Example -> the spec of a job with its plugins. The ranks of all are started by the launcher of the examples."""


@pytest.fixture(scope="module")
@starts_processes
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which all examples were installed, from their files alone: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("examples")
    # Building leaves files beside the source.
    sources = [str(shutil.copytree(ROOT / "examples" / name, folder / "source" / name)) for name in PLUGINS]
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    process = subprocess.run(
        [*argv, "--target", str(folder / "site"), *sources], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return folder / "site"


def run(installed: Path, *argv: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PYTHONPATH": f"{installed}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *argv], cwd=cwd, env=environ, capture_output=True, text=True, timeout=540)


def mtrain(installed: Path, *argv: str, cwd: Path) -> str:
    process = run(installed, "-m", "mtrain", *argv, cwd=cwd)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_their_plugins_are_listed_with_summaries_of_their_own(installed: Path, tmp_path: Path) -> None:
    entries = json.loads(mtrain(installed, "plugins", "list", "--json", cwd=tmp_path))
    actual = {name: [] for name in PLUGINS}
    for entry in entries:
        if entry["distribution"] in PLUGINS:
            actual[entry["distribution"]].append((entry["kind"], entry["name"]))
            assert entry["state"] == "ready"
            assert "mtrain" in entry["summary"] or entry["kind"] == "commands"
    assert actual == PLUGINS


def test_a_verb_stands_in_the_help_and_runs(installed: Path, tmp_path: Path) -> None:
    help_text = mtrain(installed, "--help", cwd=tmp_path)
    assert re.search(r"Inspect:\n(  .*\n)*  hello +Greet, and count the runs", help_text)
    assert mtrain(installed, "hello", "--name", "Ada", cwd=tmp_path) == "Hello, Ada: runs has 0 runs.\n"


@pytest.mark.parametrize("name", PLUGINS)
def test_they_are_typed_and_complete(installed: Path, name: str) -> None:
    module = name.replace("-", "_")
    assert (installed / module / "py.typed").is_file()
    assert all((ROOT / "examples" / name / part).exists() for part in ("README.md", "pyproject.toml", "tests"))


def test_they_pass_their_own_tests(installed: Path) -> None:
    folders = [str(ROOT / "examples" / name / "tests") for name in PLUGINS]
    process = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders, "-k", f"not {KIT}", cwd=ROOT)
    assert process.returncode == 0, process.stdout + process.stderr


@SLOW
@pytest.mark.parametrize("name", [name for name in PLUGINS if name != "mtrain-hello"])
def test_they_pass_the_checks_of_the_kit(installed: Path, name: str) -> None:
    tests = ROOT / "examples" / name / "tests"
    process = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "-k", KIT, cwd=ROOT)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "1 passed" in process.stdout


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("mtrain-convnext", "ddp"),
        pytest.param("mtrain-convnext", "fleet", marks=SLOW),
        pytest.param("mtrain-keypoints", "ddp", marks=SLOW),
        ("mtrain-keypoints", "fleet"),
        pytest.param("mtrain-labelme", "ddp", marks=SLOW),
        pytest.param("mtrain-labelme", "fleet", marks=SLOW),
    ],
)
def test_two_ranks_train_and_a_resumed_job_ends_with_the_same_bits(
    installed: Path, tmp_path: Path, name: str, backend: str
) -> None:
    make_data(name, tmp_path / "made")
    words = ("train", *JOBS[name], *SHORT, "--backend", backend, "--launcher", "pinned", "--devices", "cpu")
    mtrain(installed, *words, "--name", "job", cwd=tmp_path)
    checkpoints = tmp_path / "runs" / "job" / "checkpoints"
    expected = arrays(checkpoints / "step-00000004")
    shutil.rmtree(checkpoints / "step-00000004")
    mtrain(installed, *words, "--resume", "runs/job/checkpoints/step-00000002", cwd=tmp_path)
    assert arrays(checkpoints / "step-00000004") == expected


def make_data(name: str, folder: Path) -> None:
    """Write the small data set that the example's own tests use, where it has one."""
    file = ROOT / "examples" / name / "tests" / "conftest.py"
    if file.is_file():
        location: Any = importlib.util.spec_from_file_location(f"{name}_conftest", file)
        module = importlib.util.module_from_spec(location)
        location.loader.exec_module(module)
        module.draw(folder / "train", count=8, seed=1)
        module.draw(folder / "val", count=4, seed=2)


def arrays(checkpoint: Path) -> dict[str, bytes]:
    """The content of every file of arrays in a checkpoint."""
    found = {file.name: file.read_bytes() for file in checkpoint.glob("*.safetensors")}
    assert found
    return found
