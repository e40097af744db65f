"""Jobs on a user's own Paddle model."""

import subprocess
import sys

import pytest

from tests.own_model.runs import EXAMPLE, command, losses, refused, trained

SPEC = EXAMPLE / "paddle.yml"
FP64 = (
    "-o", "train.precision=fp64", "-o", "train.epochs=1", "-o", "model.options.dropout=0.0", "-o", "evaluate.metrics=[]",
    "-o", "evaluate.enabled=false",
)  # fmt: skip


@pytest.mark.slow
def test_fleet_trains_an_own_paddle_model_as_one_rank_does(tmp_path):
    solo = ("--backend", "solo", "-o", "backend.options.framework=paddle")
    trained(tmp_path, "one", SPEC, *FP64, *solo)
    trained(tmp_path, "three", SPEC, *FP64, "--nproc-per-node", "3")
    one = losses(tmp_path, "one")
    assert max(abs(a - b) for a, b in zip(one, losses(tmp_path, "three"), strict=True)) <= 1e-12


@pytest.mark.slow
def test_fleet_scores_an_own_paddle_model(tmp_path):
    assert trained(tmp_path, "two", SPEC, "--nproc-per-node", "2")["best"]["accuracy_score"] > 0.9


@pytest.mark.slow
def test_exported_weights_of_fleet_are_those_of_one_rank_and_loaded_by_the_layer(tmp_path):
    more = ("-o", "train.epochs=1", "-o", "train.ema.decay=0.9", "-o", "model.options.dropout=0.0")
    trained(tmp_path, "fleet", SPEC, *more, "--nproc-per-node", "2")
    one = ("--backend", "solo", "-o", "backend.options.framework=paddle", "-o", "train.accumulate=2")
    trained(tmp_path, "one", SPEC, *more, *one)
    for name in ("fleet", "one"):
        result = command(tmp_path, "weights", "export", f"runs/{name}", "--to", f"{name}.pdparams")
        assert result.returncode == 0, result.stderr
    process = subprocess.run(
        [sys.executable, "-c", LOADED, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


LOADED = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import paddle
from paddle_nets import MyNet

states = {name: paddle.load(f"{name}.pdparams") for name in ("fleet", "one")}
missing, unexpected = MyNet(width=64).set_state_dict(states["fleet"])
assert not missing and not unexpected, (missing, unexpected)
assert states["fleet"].keys() == states["one"].keys()
for name, tensor in states["fleet"].items():
    np.testing.assert_allclose(np.asarray(tensor), np.asarray(states["one"][name]), rtol=1e-6, atol=1e-7)
"""


def test_an_undeclared_framework_is_found_when_the_ranks_start(tmp_path):
    words = ("-o", "model.framework=null", "--backend", "ddp", "--nproc-per-node", "2")
    message = refused(tmp_path, "train", "-c", str(SPEC), *words)
    assert "is a model of paddle, and the backend is on torch; choose a backend on paddle" in message
