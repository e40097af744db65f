"""Scripts that freeze weights, share BatchNorm over ranks, join samples themselves, save on request or use bfloat16."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint import store
from tests.script.runs import SCRIPTS, done, largest_difference, run, summary, weights

FEATURES = str(SCRIPTS / "train_features.py")
KEEP = ("-o", "checkpoint.keep_last=9")
RANKS = {
    "ddp-3": ("--backend", "ddp", "--nproc-per-node", "3"),
    "horovod-2": ("--backend", "horovod", "--nproc-per-node", "2"),
    "zero3-2": ("--backend", "deepspeed", "--nproc-per-node", "2", "-o", "backend.options.stage=3"),
}


@pytest.mark.parametrize(
    "ranks", ["ddp-3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("horovod-2", "zero3-2"))]
)
def test_frozen_weights_and_batchnorm_over_ranks_train_as_on_one_rank(ranks, tmp_path):
    exact = ("--precision", "fp64", "--dropout", "0")
    done(tmp_path, "--name", "one", "--backend", "solo", *KEEP, FEATURES, *exact)
    done(tmp_path, "--name", "many", *RANKS[ranks], *KEEP, FEATURES, *exact)
    difference = largest_difference(weights(tmp_path, "many"), weights(tmp_path, "one"))
    print(f"{ranks}: largest difference to one rank {difference:.1e}")
    assert difference <= 1e-12
    requested = store.load(tmp_path / "runs/many/checkpoints/step-00000005").state.weights
    last = weights(tmp_path, "many")
    assert np.array_equal(requested["stem.weight"], last["stem.weight"]), "a frozen weight was trained"
    assert not np.array_equal(requested["head.2.weight"], last["head.2.weight"])
    assert summary(tmp_path, "many")["best"] == summary(tmp_path, "one")["best"]


def test_a_bfloat16_script_continues_from_a_requested_checkpoint_to_the_same_bits(tmp_path):
    ranks = ("--nproc-per-node", "2", *KEEP)
    done(tmp_path, "--name", "whole", *ranks, FEATURES, "--precision", "bf16")
    shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/cut")
    for later in ("step-00000010", "step-00000020"):
        shutil.rmtree(tmp_path / "runs/cut/checkpoints" / later)
    result = done(tmp_path, "--resume", "runs/cut", *ranks, FEATURES, "--precision", "bf16")
    assert "step-00000005" in result.stdout
    whole, cut = summary(tmp_path, "whole"), summary(tmp_path, "cut")
    assert (cut["weights_sha256"], cut["ema_sha256"]) == (whole["weights_sha256"], whole["ema_sha256"])
    assert weights(tmp_path, "whole")["stem.weight"].dtype == np.float32


IN_A_THREAD = """
import contextvars
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import mtrain


def train():
    with mtrain.session() as session:
        session.prepare(lambda: torch.nn.Linear(2, 1), optimizer=mtrain.SGD(learning_rate=0.1))
        print(f"{session.size} ranks train", flush=True)


with ThreadPoolExecutor(1) as pool:
    pool.submit(*([contextvars.copy_context().run] if "copied" in sys.argv else []), train).result()
"""


def test_a_session_in_a_thread_of_its_own_does_not_train_alone_in_silence(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(IN_A_THREAD)
    job = ("--backend", "ddp", "--nproc-per-node", "2", "threaded.py")
    refused = run(tmp_path, "--name", "refused", *job)
    assert (refused.returncode, "in a thread of its own" in refused.stderr) == (2, True), (
        refused.stdout + refused.stderr
    )
    done(tmp_path, "--name", "copied", *job, "copied")
    trained = {name: logs_of(tmp_path, name).count("ranks train") for name in ("refused", "copied")}
    assert trained == {"refused": 0, "copied": 2}
    assert "2 ranks train" in logs_of(tmp_path, "copied")


def logs_of(here: Path, name: str) -> str:
    return "".join(file.read_text() for file in sorted((here / "runs" / name / "logs").glob("rank-*.log")))
