"""Jobs on a user's own torch model: the same weights for every number of ranks, resume to the same bits, no hang."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.own_model.runs import EXAMPLE, QUIET, command, losses, refused, trained

pytestmark = pytest.mark.job

FP64 = (
    "-o", "train.precision=fp64", "-o", "train.epochs=1", "-o", "model.options.dropout=0.0",
    "-o", "evaluate.metrics=[torchmetrics.classification:BinaryAccuracy]",
)  # fmt: skip
SPEC = EXAMPLE / "own.yml"
WRONG = """
import os
import numpy as np
import torch

class Net(torch.nn.Linear):
    def __init__(self, fault):
        super().__init__(1, 1)
        self.fault = fault

    def forward(self, batch):
        loss = super().forward(batch[:, None]).mean()
        if self.fault == "one rank" and os.environ["RANK"] == "0":
            return loss
        return {"vector": loss.reshape(1).repeat(2), "detached": loss.detach()}.get(self.fault, {"los": loss})

def data(split="train"):
    return np.arange(32, dtype=np.float32)
"""


def test_one_two_and_three_ranks_have_the_same_losses_and_metrics(tmp_path):
    one = trained(tmp_path, "one", SPEC, *FP64, "--backend", "solo")
    two = trained(tmp_path, "two", SPEC, *FP64, "--nproc-per-node", "2", "-o", "train.accumulate=2")
    three = trained(tmp_path, "three", SPEC, *FP64, "--backend", "horovod", "--nproc-per-node", "3")
    expected = losses(tmp_path, "one")
    assert len(expected) == 9
    for name in ("two", "three"):
        assert max(abs(a - b) for a, b in zip(expected, losses(tmp_path, name), strict=True)) <= 1e-12
    # a metric of torchmetrics would wait for the other ranks for ever, or count samples several times
    assert one["last"]["BinaryAccuracy"] == two["last"]["BinaryAccuracy"] == three["last"]["BinaryAccuracy"] > 0.8


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("vector", "Net.forward(batch) has the shape (2,); expected a single number"),
        pytest.param("detached", "Net.forward(batch) carries no gradient", marks=pytest.mark.slow),
        pytest.param("one rank", "returned a dict with los; expected the loss to", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_forward_ends_all_ranks_with_one_sentence(fault, sentence, tmp_path):
    (tmp_path / "nets.py").write_text(WRONG)
    (tmp_path / "wrong.yml").write_text(
        f"model: {{name: ./nets.py:Net, options: {{fault: {fault}}}}}\ndata: {{format: ./nets.py:data}}\n"
        "train: {updates: 2, batch_size: 4}\n"
    )
    message = refused(tmp_path, "train", "-c", "wrong.yml", *QUIET, "--nproc-per-node", "2")
    assert sentence in message


@pytest.mark.slow
def test_torchmetrics_on_two_ranks_counts_each_sample_once(tmp_path):
    words = ("-o", "train.updates=2", "-o", "model.options.layers=1", "--nproc-per-node", "2")
    two = trained(tmp_path, "two", EXAMPLE / "vision.yml", *words)
    assert 0 <= two["last"]["MulticlassAccuracy"] <= 1
    assert round(two["last"]["MulticlassAccuracy"] * 300, 3) == round(round(two["last"]["MulticlassAccuracy"] * 300), 3)


@pytest.mark.slow
def test_a_killed_job_with_dropout_continues_to_the_same_bits(tmp_path):
    words = ("--nproc-per-node", "2", "-o", "train.epochs=2", "-o", "checkpoint.every_updates=3")
    whole = trained(tmp_path, "whole", SPEC, *words)
    (tmp_path / "slow_cells.py").write_text(
        f"import sys, time\nsys.path.insert(0, {str(EXAMPLE)!r})\nimport cells\n"
        "class Cells(cells.Cells):\n"
        "    def __getitem__(self, index):\n        time.sleep(0.01)\n        return super().__getitem__(index)\n"
    )
    line = [sys.executable, "-m", "mtrain", "train", "-c", str(SPEC), "--name", "cut", *QUIET, *words]
    slow = ["-o", "data.format=./slow_cells.py:Cells", "-o", "data.options.noise=0.1"]
    job = subprocess.Popen([*line, *slow], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "runs/cut/checkpoints/step-00000006/MANIFEST.json")
    ranks = [
        child for child in psutil.Process(job.pid).children(recursive=True) if "mtrain.rank.worker" in child.cmdline()
    ]
    os.kill(max(ranks, key=lambda child: child.create_time()).pid, signal.SIGKILL)
    assert job.wait(120) == 1
    result = command(tmp_path, "train", "-c", str(SPEC), "--resume", "runs/cut", *QUIET, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "goes on from" in result.stdout
    cut = trained_summary(tmp_path, "cut")
    assert cut["weights_sha256"] == whole["weights_sha256"]
    assert cut["last"] == whole["last"]


DROPPING = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(1, 1)

    def forward(self, batch):
        return self.last(self.drop(batch[:, None])).square().mean()

def data(split="train"):
    return torch.arange(32, dtype=torch.float32).numpy()
"""


def test_dropout_that_differs_on_another_number_of_ranks_is_told_when_a_run_goes_on(tmp_path):
    """Ranks x micro batches decide on the draws: 2 x 1 and 1 x 2 draw the same, 1 x 1 others."""
    (tmp_path / "nets.py").write_text(DROPPING)
    (tmp_path / "own.yml").write_text(
        "model: {name: ./nets.py:Net}\ndata: {format: ./nets.py:data}\nevaluate: {enabled: false}\n"
        "train: {updates: 2, batch_size: 8, precision: fp64}\ncheckpoint: {every_updates: 2, keep_last: 9}\n"
    )
    words = ("train", "-c", "own.yml", *QUIET)
    assert command(tmp_path, *words, "--name", "two", "--nproc-per-node", "2").returncode == 0
    half = "runs/two/checkpoints/step-00000002"
    told, drawn = {}, {}
    for name, micro in (("same", "2"), ("other", "1")):
        shutil.copytree(tmp_path / "runs/two", tmp_path / "runs" / name)
        more = ("--nproc-per-node", "1", "-o", f"train.accumulate={micro}", "train.updates=4")
        result = command(tmp_path, *words, "--resume", half.replace("two", name), *more)
        assert result.returncode == 0, result.stdout + result.stderr
        told[name], drawn[name] = result.stdout + result.stderr, losses(tmp_path, name)
    assert command(tmp_path, *words, "--resume", half, "-o", "train.updates=4").returncode == 0
    assert losses(tmp_path, "two") == pytest.approx(drawn["same"], rel=1e-12)
    assert losses(tmp_path, "two") != pytest.approx(drawn["other"], rel=1e-3)
    assert "random layers of your module" in told["other"]
    assert "random layers" not in told["same"]


def trained_summary(here: Path, name: str) -> dict:
    import json

    return json.loads((here / "runs" / name / "summary.json").read_text())


def wait_for(path: Path) -> None:
    for _ in range(1200):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} did not appear")


STACKS = {
    "ddp": ("ddp",),
    "horovod": ("horovod",),
    # without the threshold weights as small as these would stay whole on every rank
    "zero-3": (
        "deepspeed", "-o", "backend.options.stage=3",
        "-o", "backend.options.config.zero_optimization.stage3_param_persistence_threshold=0",
    ),
    "fsdp": ("fsdp",),
}  # fmt: skip


@pytest.mark.slow
def test_exported_weights_are_those_of_ddp_whichever_backend_splits_them(tmp_path, monkeypatch):
    """Two ranks each, with an average of the weights; the files are loaded by the module itself."""
    import torch
    from safetensors.torch import load_file

    monkeypatch.syspath_prepend(str(EXAMPLE))
    from nets import MyNet

    states = {}
    for name, words in STACKS.items():
        more = ("-o", "train.epochs=1", "-o", "train.ema.decay=0.9")
        trained(tmp_path, name, SPEC, *more, "--nproc-per-node", "2", "--backend", *words)
        for target in (f"{name}.pt", f"{name}.safetensors"):
            result = command(tmp_path, "weights", "export", f"runs/{name}", "--to", target)
            assert result.returncode == 0, result.stderr
        states[name] = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        also = load_file(tmp_path / f"{name}.safetensors")
        assert all(torch.equal(states[name][key], also[key]) for key in states[name].keys() | also.keys())
        MyNet(width=64).load_state_dict(states[name], strict=True)
    start = MyNet(width=64).state_dict()
    assert {key: tensor.shape for key, tensor in start.items()} == {key: x.shape for key, x in states["ddp"].items()}
    differing = [
        (name, key)
        for name, state in states.items()
        for key in state
        if not torch.equal(state[key], states["ddp"][key])
    ]
    assert differing == []
