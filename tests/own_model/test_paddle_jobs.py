"""Jobs on a user's own Paddle model."""

import pytest

from tests.own_model.runs import EXAMPLE, losses, refused, trained

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


def test_an_undeclared_framework_is_found_when_the_ranks_start(tmp_path):
    words = ("-o", "model.framework=null", "--backend", "ddp", "--nproc-per-node", "2")
    message = refused(tmp_path, "train", "-c", str(SPEC), *words)
    assert "is a model of paddle, and the backend is on torch; choose a backend on paddle" in message
