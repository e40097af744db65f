"""A job as a tracker sees it, in a process of its own: ``python -m tests.trackers.tracked NAME OPTIONS FOLDER START LAST REASON``."""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from mtrain.core.interfaces.reporter import ReportedRun, tell
from mtrain.spec import plugins
from mtrain.spec.registry import Registry


def update_record(update: int) -> dict:
    """Return what a tracker reads of an update; its norm is no number that a service takes."""
    losses = {"total": 2.0 / (update + 1), "box": 1.0 / (update + 1)}
    return {"kind": "update", "update": update, "losses": losses, "learning_rate": 0.01, "gradient_norm": float("inf")}


def main() -> None:
    name, options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    start, last, reason = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
    spec = {"train": {"epochs": 3, "freeze": []}, "data": {"options": {"./a.py:B": True}}}
    spec["report"] = {"reporters": {"mlflow": {"tracking_uri": "http://bob:hunter2@tracking:5000"}}}
    run = ReportedRun(folder=folder, rank=0, size=1, start_update=start, spec=spec)
    target = plugins.load("reporters", name)
    reporter = target(Registry.read().options("reporters", name, options, path=f"report.reporters.{name}"), run)
    tell(reporter, {"kind": "start", "update": start})
    Image.fromarray(np.full((24, 32, 3), last % 256, np.uint8)).save(folder / "val_batch.jpg")
    checkpoint = folder / "checkpoints" / f"step-{last:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(b"w" * 100)
    for update in range(start, last):
        tell(reporter, update_record(update))
    metrics = {"kind": "evaluation", "metrics": {"AP@50": 0.5, "AP@50/cat": 0.25}, "update": last, "epoch": 1}
    tell(reporter, {**metrics, "images": ["val_batch.jpg"]})
    tell(reporter, {"kind": "checkpoint", "folder": str(checkpoint.parent), "update": last})
    error = ""
    try:
        tell(reporter, {"kind": "end", "reason": reason, "error": "ValueError: x" if reason == "failed" else ""})
    except Exception as refusal:
        error = str(refusal)
    print(json.dumps({"trouble": reporter.trouble, "error": error}))


if __name__ == "__main__":
    main()
