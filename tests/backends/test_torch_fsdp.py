"""The backend fsdp: what it trains and saves is what ddp trains and saves."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.testing.conftest import mtrain

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import State
from mtrain.core.overriding import override
from mtrain_kit import training
from tests.script.runs import SCRIPTS, largest_difference, weights


def test_averages_that_a_checkpoint_lacks_begin_at_the_restored_weights() -> None:
    """One that was written without an average, by a job that has one now."""
    from mtrain.backends._torch.sharded.engine import SplitEngine
    from mtrain.backends._torch.sharded.optimizer import PartsOptimizer

    began: list[str] = []

    class Optimizer(PartsOptimizer):
        def __init__(self) -> None:
            self.parts = cast(Any, {})

        @override
        def settle(self) -> None: ...

        @override
        def ema(self) -> dict[str, Any]:
            return {}

        @override
        def restart_ema(self) -> None:
            began.append("again")

    engine = SplitEngine.__new__(SplitEngine)
    engine.restore(cast(Any, SimpleNamespace(state_dict=dict)), Optimizer(), State())
    assert began == ["again"]


@pytest.mark.slow
def test_a_detector_learns_what_it_learns_under_ddp(tmp_path: Path) -> None:
    """YOLOv5n in float64: the loss of the last update and every weight."""
    shared = ["-c", "digits", "--nproc-per-node", "2", "-o", "train.updates=4", "-o", "train.epochs=null"]
    shared += ["-o", "train.precision=fp64", "-o", "train.batch_size=8", "-o", "data.image_size=64"]
    shared += ["-o", "evaluate.every_epochs=null", "-o", "data.workers=0", "-o", "report.plots=false"]
    states = {}
    for name in ("ddp", "fsdp"):
        argv = ["train", *shared, "--backend", name, "--name", name, "--devices", "cpu"]
        process = mtrain(*argv, cwd=tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
        newest = store.newest(tmp_path / "runs" / name / "checkpoints")
        assert newest is not None
        states[name] = training.flat(store.load(newest).state)
    worst = max(training.differences(states["ddp"], states["fsdp"]).values())
    assert np.isfinite(worst)
    assert worst <= 1e-9


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_script_trains_to_the_weights_of_ddp(tmp_path: Path, ranks: int) -> None:
    """Weights tied over parts of the model, weights used never or now and then, accumulation; in float64."""
    script = [str(SCRIPTS / "train_torch.py"), "--precision", "fp64", "--dropout", "0", "--epochs", "1"]
    quiet = ["-o", "report.plots=false", "report.tensorboard=false"]
    for backend in ("ddp", "fsdp"):
        argv = ["run", *quiet, "--name", backend, "--backend", backend, "--nproc-per-node", str(ranks)]
        process = mtrain(*argv, *script, cwd=tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
    difference = largest_difference(weights(tmp_path, "fsdp"), weights(tmp_path, "ddp"))
    print(f"fsdp on {ranks} ranks: largest difference to ddp {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.slow
def test_compare_finds_that_a_script_trains_the_same_bits_under_ddp_and_fsdp(tmp_path: Path) -> None:
    argv = ["compare", "--script", str(SCRIPTS / "train_torch.py"), "--backends", "ddp,fsdp,fsdp:unit=model"]
    process = mtrain(*argv, "--updates", "6", "--out", "out", cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    metrics = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert metrics["same_bits"] == [["ddp", "fsdp", "fsdp:unit=model"]]
