"""The outside plugin of the docs: a distribution of its own, installed, found by name, and put to the conformance kit."""

import ast
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain.core.interfaces import State
from tests.fsdp_example import EXAMPLE, install
from tests.script.runs import SCRIPTS, largest_difference, weights
from tests.testing.conftest import ROOT, mtrain


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the distribution was installed, from its files alone: nothing is downloaded."""
    return install(tmp_path_factory.mktemp("fsdp"))


def path(installed: Path) -> str:
    return f"{installed}:{ROOT}"


def test_its_name_is_listed_once_it_is_installed(installed: Path, tmp_path: Path) -> None:
    process = mtrain("plugins", "list", "backends", "--json", cwd=tmp_path, PYTHONPATH=path(installed))
    actual = {entry["name"]: entry for entry in json.loads(process.stdout)}
    assert (actual["fsdp"]["distribution"], actual["fsdp"]["state"]) == ("mtrain-fsdp", "ready")
    assert actual["fsdp"]["summary"].startswith("mtrain on torch's FSDP2"), "its own"


def test_it_uses_nothing_of_mtrain_but_what_the_docs_declare_public() -> None:
    nodes = [node for file in EXAMPLE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    used = {
        f"mtrain.core.{alias.name}" if node.module == "mtrain.core" else str(node.module)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mtrain.")
        for alias in node.names
    }
    public = (ROOT / "docs" / "writing-a-backend.md").read_text()
    assert used
    assert [name for name in used if "._" in name or f"`{name}`" not in public] == []


def test_averages_that_a_checkpoint_lacks_begin_at_the_restored_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was written without an average, by a job that has one now."""
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    engine = importlib.import_module("mtrain_fsdp.engine").FsdpEngine
    began: list[str] = []
    optimizer = SimpleNamespace(ema=dict, restart_ema=lambda: began.append("again"), settle=lambda: None)
    engine.restore(engine.__new__(engine), SimpleNamespace(state_dict=dict), optimizer, State())
    assert began == ["again"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_keeps_every_promise(installed: Path, tmp_path: Path, ranks: int) -> None:
    process = mtrain("plugins", "test", "fsdp", "--ranks", str(ranks), cwd=tmp_path, PYTHONPATH=path(installed))
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.slow
def test_a_detector_learns_what_it_learns_under_ddp(installed: Path, tmp_path: Path) -> None:
    """YOLOv5n in float64: the loss of the last update and every weight."""
    shared = ["-c", "digits", "--nproc-per-node", "2", "-o", "train.updates=4", "-o", "train.epochs=null"]
    shared += ["-o", "train.precision=fp64", "-o", "train.batch_size=8", "-o", "data.image_size=64"]
    shared += ["-o", "evaluate.every_epochs=null", "-o", "data.workers=0", "-o", "report.plots=false"]
    import numpy as np

    from mtrain.core.checkpoint import store
    from mtrain.testing import training

    states = {}
    for name in ("ddp", "fsdp"):
        argv = ["train", *shared, "--backend", name, "--name", name, "--devices", "cpu"]
        process = mtrain(*argv, cwd=tmp_path, PYTHONPATH=path(installed))
        assert process.returncode == 0, process.stdout + process.stderr
        newest = store.newest(tmp_path / "runs" / name / "checkpoints")
        assert newest is not None
        states[name] = training.flat(store.load(newest).state)
    worst = max(training.differences(states["ddp"], states["fsdp"]).values())
    assert np.isfinite(worst)
    assert worst <= 1e-9


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_script_trains_to_the_weights_of_ddp(installed: Path, tmp_path: Path, ranks: int) -> None:
    """Weights tied over parts of the model, weights used never or now and then, accumulation; in float64."""
    script = [str(SCRIPTS / "train_torch.py"), "--precision", "fp64", "--dropout", "0", "--epochs", "1"]
    quiet = ["-o", "report.plots=false", "report.tensorboard=false"]
    for backend in ("ddp", "fsdp"):
        argv = ["run", *quiet, "--name", backend, "--backend", backend, "--nproc-per-node", str(ranks)]
        process = mtrain(*argv, *script, cwd=tmp_path, PYTHONPATH=path(installed))
        assert process.returncode == 0, process.stdout + process.stderr
    difference = largest_difference(weights(tmp_path, "fsdp"), weights(tmp_path, "ddp"))
    print(f"fsdp on {ranks} ranks: largest difference to ddp {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.slow
def test_compare_finds_that_a_script_trains_the_same_bits_under_ddp_and_fsdp(installed: Path, tmp_path: Path) -> None:
    argv = ["compare", "--script", str(SCRIPTS / "train_torch.py"), "--backends", "ddp,fsdp,fsdp:unit=model"]
    process = mtrain(*argv, "--updates", "6", "--out", "out", cwd=tmp_path, PYTHONPATH=path(installed))
    assert process.returncode == 0, process.stdout + process.stderr
    metrics = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert metrics["same_bits"] == [["ddp", "fsdp", "fsdp:unit=model"]]
