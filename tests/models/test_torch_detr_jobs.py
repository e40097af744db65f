"""Jobs on transformers' detectors through the real command line: a plain loop's losses, any backend, what is written."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForObjectDetection

from mtrain.core.network.noise import shard_seed
from mtrain.core.samples.sampler import Shuffled
from mtrain.spec import config as spec_config
from mtrain.tasks.datasets import open_data
from tests.models.detr_specs import CONFIGS

pytestmark = pytest.mark.job

UPDATES, BATCH, SEED = 5, 4, 3
TOLERANCE = 1e-12
RATES = {"rt_detr": 1e-3, "rt_detr_v2": 1e-3, "d_fine": 1e-6}
"""D-FINE has no float64. A rounding can give an object to another query, and at larger rates updates do that soon."""
ROUNDING = 1e-4
"""Largest relative difference of a loss in float32, between other orders of additions and layouts."""
LIMIT_S = 500
"""Within the time that a test may take. A job takes ten seconds on a machine that does nothing else, and has taken forty times as
long beside other work, so a test trains one or two."""
BACKENDS = {
    "zero1": ("deepspeed", "-o", "backend.options.stage=1"),
    "zero2": ("deepspeed", "-o", "backend.options.stage=2"),
    "zero3": ("deepspeed", "-o", "backend.options.stage=3"),
    "fsdp": ("fsdp",),
}


def specification(name: str, precision: str) -> dict:
    """A job on the embedded digits, without augmentation that the plain loop would have to repeat."""
    return {
        "model": {"name": name, "options": {"config": CONFIGS[name]}},
        "data": {
            "format": "digits",
            "image_size": 96,
            "resize": "stretch",
            "augment": {
                **dict.fromkeys(("mosaic", "translate", "scale", "hsv_h", "hsv_s", "hsv_v"), 0.0),
                "flip_lr": 0.5,
            },
        },
        "train": {
            "updates": UPDATES,
            "batch_size": BATCH,
            "seed": SEED,
            "clip_norm": 0.1,
            "precision": precision,
            "ema": None,
        },
        "optimizer": {
            "rule": "adamw",
            "learning_rate": RATES[name],
            "weight_decay": 0.01,
            "momentum": 0.9,
            "groups": [{"match": ""}],
        },
        "schedule": {"name": "constant", "warmup": None},
        "evaluate": {"enabled": False},
        "cluster": {"threads": 1},
        "report": {"plots": False, "tensorboard": False},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a spec for each model."""
    here = tmp_path_factory.mktemp("detr")
    for name in CONFIGS:
        precision = "fp32" if name == "d_fine" else "fp64"
        (here / f"{name}.yml").write_text(yaml.safe_dump(specification(name, precision)))
    return here


def ran(folder: Path, *words: str) -> str:
    line = [sys.executable, "-m", "mtrain", *words]
    result = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def losses(folder: Path, name: str, run: str, *words: str) -> list[float]:
    """Train, and return the loss of each update."""
    ran(folder, "train", "-c", f"{name}.yml", "--name", run, *words)
    records = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    return [record["losses"]["total"] for record in records if record["kind"] == "update"]


def scored(folder: Path, run: str) -> dict[str, float]:
    """Return the metrics of the last evaluation of a run."""
    records = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, float] = [record["metrics"] for record in records if record.get("metrics")][-1]
    return found


def plain_losses(folder: Path, name: str) -> list[float]:
    """Train the same with a loop of torch and transformers alone, on mtrain's samples."""
    loaded = spec_config.load(str(folder / f"{name}.yml"))
    opened = open_data(loaded.spec.data, registry=loaded.job.registry)
    source = loaded.job.task_named("detection")(loaded.spec, opened).sources()["train"]
    order = Shuffled(len(source), global_batch=BATCH, seed=SEED)
    dtype = torch.float32 if name == "d_fine" else torch.float64
    torch.manual_seed(SEED)
    model = AutoModelForObjectDetection.from_config(AutoConfig.for_model(name, **CONFIGS[name], num_labels=10)).to(
        dtype
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[name], weight_decay=0.01)
    model.train()
    found = []
    for update in range(UPDATES):
        samples = [source.sample(0, int(i), update=update) for i in order.global_batch_indices(0, update)]
        pixels = torch.stack([torch.from_numpy(sample.image) for sample in samples]).permute(0, 3, 1, 2).to(dtype) / 255
        rows = [torch.from_numpy(sample.targets) for sample in samples]
        labels = [{"class_labels": row[:, 0].long(), "boxes": row[:, 1:].to(dtype)} for row in rows]
        torch.manual_seed(shard_seed(SEED, 0, update))
        loss = model(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def largest(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) == UPDATES
    difference = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    print(f"largest relative difference of a loss: {difference:.1e}")
    return difference


def test_one_rank_has_the_losses_of_a_plain_loop_of_transformers(folder):
    found = losses(folder, "rt_detr", "one", "--backend", "solo", "--nproc-per-node", "1")
    assert largest(found, plain_losses(folder, "rt_detr")) <= TOLERANCE
    assert len(set(found)) == UPDATES


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bound"), [("rt_detr_v2", TOLERANCE), ("d_fine", ROUNDING)])
def test_others_have_the_losses_of_a_plain_loop_too(folder, name, bound):
    found = losses(folder, name, name, "--backend", "solo", "--nproc-per-node", "1")
    expected = plain_losses(folder, name)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert largest(found, expected) <= bound


@pytest.fixture(scope="module")
def losses_of_ddp(folder):
    """Return the losses of a model on ddp, which is trained once."""
    return cache(lambda name: losses(folder, name, f"{name}-ddp", "--nproc-per-node", "2", "--backend", "ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["rt_detr", "d_fine"])
def test_every_backend_on_torch_trains_the_same_losses(folder, losses_of_ddp, name, backend):
    found = losses(folder, name, f"{name}-{backend}", "--nproc-per-node", "2", "--backend", *BACKENDS[backend])
    assert largest(found, losses_of_ddp(name)) <= (TOLERANCE if name == "rt_detr" else ROUNDING)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # five commands
def test_a_run_is_written_as_weights_and_as_a_program_that_scores_as_it_does(folder):
    extra = ["-o", "train.precision=fp32", "-o", "evaluate.enabled=true", "-o", "evaluate.every_epochs=null"]
    ran(folder, "train", "-c", "rt_detr.yml", "--name", "shown", "--backend", "solo", "--nproc-per-node", "1", *extra)
    ran(folder, "weights", "export", "runs/shown", "--to", "shown.pt")
    ran(folder, "export", "--run", "runs/shown", "--no-dynamic-batch", "--out", "shown.onnx")
    expected = scored(folder, "shown")
    assert expected["AR100"] > 0
    for file in ("shown.pt", "shown.onnx"):
        ran(folder, "evaluate", "-c", "rt_detr.yml", "--backend", "solo", "--name", file, "--weights", file, *extra)
        assert scored(folder, file)["AR100"] == pytest.approx(expected["AR100"], abs=2e-3), file
