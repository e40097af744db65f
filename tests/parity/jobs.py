"""Real jobs through the command line, and how far apart two of them are.

A job trains on the embedded digits at 96 px; its losses and norms come from ``metrics.jsonl``, its weights, averages
and moments from its last checkpoint.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray[Any, np.dtype[Any]]
SAMPLES, SIDE, BATCH = 40, 96, 8
PARTS = {"weights": "weights.safetensors", "ema": "ema.safetensors", "moments": "optimizer.safetensors"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One job."""

    model: str
    backend: str
    framework: str = "torch"
    """Of ``solo``; other backends have their own."""
    ranks: int = 1
    precision: str = "fp32"
    updates: int = 50
    save_every: int = 1000

    @property
    def name(self) -> str:
        """Return the name of the run folder."""
        stack = f"solo-{self.framework}" if self.backend == "solo" else self.backend
        return f"{self.model}-{stack}-{self.ranks}-{self.precision}-{self.updates}"

    def arguments(self, folder: Path, data: Path) -> list[str]:
        """Return the arguments of ``mtrain train``: sgd with momentum, warm-up, clipping, EMA, augmentation."""
        values: dict[str, Any] = {
            "data.format": "coco",
            "data.root": data,
            "data.train": "annotations/instances_train.json",
            "data.val": "annotations/instances_val.json",
            "data.images": "images",
            "data.image_size": SIDE,
            "data.workers": 1,
            "train.epochs": "null",
            "train.updates": self.updates,
            "train.batch_size": BATCH,
            "train.reference_batch_size": BATCH,
            "train.precision": self.precision,
            "schedule.warmup.epochs": 0,
            "schedule.warmup.updates": 10,
            "evaluate.every_epochs": "null",
            "evaluate.at_end": "false",
            "checkpoint.every_epochs": "null",
            "checkpoint.every_updates": self.save_every,
            "checkpoint.keep_last": 100,
            "report.dir": folder,
            "report.plots": "false",
            "report.tensorboard": "false",
            **SPECS[self.model],
        }
        if self.backend == "solo":
            values["backend.options.framework"] = self.framework
        pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        head = ["-c", CONFIGS[self.model], "--backend", self.backend, "--nproc-per-node", str(self.ranks)]
        return [*head, "--name", self.name, *pairs]


CONFIGS = {"yolov5n": "yolov5n", "ppyoloe_s": "ppyoloe"}
SPECS: Mapping[str, Mapping[str, Any]] = {
    # Training from scratch multiplies a difference: at learning rate 0.01 and batch 4, a torch job whose start weights are moved
    # by 1e-15
    # has another loss in the third digit after 20 updates. These jobs learn and stay within 1e-11 of such a neighbour.
    "yolov5n": {"optimizer.learning_rate": 0.0005, "train.clip_norm": 1.0, "train.ema.ramp": 20},
    "ppyoloe_s": {
        "optimizer.learning_rate": 0.0005,
        "train.clip_norm": 2.0,
        "train.sync_batchnorm": "false",
        "data.augment.sizes": "[64, 96]",
        # the first updates by the static assigner, the others by the task-aligned one
        "model.options.static_assigner_epoch": 4,
    },
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The records of a finished job."""

    losses: Array
    """(updates,) total, mean over the global batch."""
    norms: Array
    """(updates,) before clipping."""
    arrays: Mapping[str, Mapping[str, Array]] = field(repr=False)
    """weights, ema, moments -> name -> values at the end."""


def environment() -> dict[str, str]:
    """One thread a rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def mtrain(*arguments: str, timeout_s: float = 400) -> str:
    """Run the command line; its output.

    Raises:
        AssertionError: it failed.
    """
    process = subprocess.run(
        [sys.executable, "-m", "mtrain", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert process.returncode == 0, f"{arguments}\n{process.stdout[-3000:]}\n{process.stderr[-6000:]}"
    return process.stdout + process.stderr


def make_data(folder: Path) -> Path:
    """The digits as COCO, in ``folder``."""
    mtrain("data", "make", "digits", str(folder), "--train", str(SAMPLES), "--val", "4", "--size", str(SIDE))
    return folder


def run(setting: Setting, folder: Path, data: Path, *, resume: Path | None = None) -> Trace:
    """Train, or go on from the checkpoint ``resume``, to the end."""
    more = ["--resume", str(resume)] if resume else []
    mtrain("train", *setting.arguments(folder, data), *more)
    return trace(folder / setting.name)


def trace(run_folder: Path) -> Trace:
    """Read the records of a finished job."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    updates = [row for row in map(json.loads, lines) if row["kind"] == "update"]
    newest = sorted((run_folder / "checkpoints").glob("step-*"))[-1]
    arrays = {part: load_file(newest / name) for part, name in PARTS.items() if (newest / name).exists()}
    return Trace(
        losses=np.array([row["losses"]["total"] for row in updates]),
        norms=np.array([row["gradient_norm"] for row in updates]),
        arrays=arrays,
    )


def relative(a: Array, b: Array) -> float:
    """Largest difference relative to the largest magnitude (0.001 at least); inf where it is not a number."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    actual = float(np.abs(a - b).max(initial=0.0) / max(np.abs(a).max(initial=0.0), 1e-3))
    return float("inf") if np.isnan(actual) else actual


def curve(a: Array, b: Array) -> Array:
    """Relative difference of two series, number by number."""
    return np.abs(a - b) / np.maximum(np.abs(a), 1e-12)


def differences(a: Trace, b: Trace) -> dict[str, float]:
    """Largest relative difference of: loss and norm over all updates; each array of weights, ema and moments."""
    actual = {"loss": float(curve(a.losses, b.losses).max()), "norm": float(curve(a.norms, b.norms).max())}
    for part, arrays in a.arrays.items():
        others = b.arrays[part]
        assert arrays.keys() == others.keys(), set(arrays) ^ set(others)
        actual[part] = max(relative(array, others[name]) for name, array in arrays.items())
    return actual


def partner(setting: Setting) -> Setting:
    """The same job on the other framework."""
    if setting.backend == "solo":
        return replace(setting, framework="paddle" if setting.framework == "torch" else "torch")
    return replace(setting, backend={"ddp": "fleet", "fleet": "ddp"}[setting.backend])
