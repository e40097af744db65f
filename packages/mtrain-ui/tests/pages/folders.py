"""Run folders that were never trained: what a job writes, with values of the test's choice."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.data.images.drawing import save_image

TIME = 1_700_000_000.0


def update(number: int, **fields: Any) -> dict[str, Any]:
    losses = {"total": 2.0 * math.exp(-number / 20), "box": 0.5}
    common = {
        "learning_rate": 0.1,
        "learning_rates": [0.1, 0.1],
        "gradient_norm": 1.5,
        "samples_per_second": 100.0,
        "data_wait_share": 0.25,
        "update_seconds": 0.1,
    }
    return {"kind": "update", "time": TIME + number, "update": number, "losses": losses, **common, **fields}


def evaluation(after: int, score: float, **fields: Any) -> dict[str, Any]:
    metrics = {"score": score, "accuracy": score, "accuracy/cat": score, "accuracy/dog": 0.5}
    common = {"epoch": 0, "metrics": metrics, "headline": ["accuracy"], "seconds": 2.0}
    return {"kind": "evaluation", "time": TIME + after, "update": after, **common, **fields}


def start(**fields: Any) -> dict[str, Any]:
    common = {"backend": "ddp", "model": "vit", "ranks": 2, "device": "cpu", "total_updates": 60, "train_samples": 10}
    return {"kind": "start", "time": TIME, "update": 0, **common, **fields}


def end(reason: str = "done") -> dict[str, Any]:
    return {"kind": "end", "time": TIME + 60, "reason": reason, "seconds": 60.0}


def records(updates: int = 60, *, score: float = 0.9, reason: str | None = "done") -> list[dict[str, Any]]:
    body = [start(), *(update(number) for number in range(updates)), evaluation(updates, score)]
    return body + ([end(reason)] if reason else [])


def write_run(folder: Path, lines: list[dict[str, Any]] | None = None, **files: Any) -> Path:
    """Write a run folder. ``files``: content of ``<name>.json`` by name."""
    folder.mkdir(parents=True, exist_ok=True)
    written = records() if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    (folder / "spec.yml").write_text("train:\n  epochs: 1\n")
    spec = files.pop("spec", {"train": {"epochs": 1, "seed": 0}})
    for name, content in {"spec": spec, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs/rank-0.log").write_text("first line\nsecond line\n")
    return folder


def image(path: Path, width: int = 64, height: int = 48) -> None:
    save_image(np.full((height, width, 3), 90, np.uint8), path)
