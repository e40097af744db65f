"""Seconds from the command to the end of the first update, mtrain against the hand-written script, in turn, medians."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TARGET = 1.3


def ours(root: Path, folder: Path) -> float:
    """``mtrain train`` as a user types it, everything switched on."""
    values = {
        "data.format": "coco",
        "data.root": root,
        "data.train": "annotations/instances_train.json",
        "data.val": "annotations/instances_val.json",
        "data.images": "images",
        "data.image_size": 320,
        "data.workers": 1,
        "train.batch_size": 8,
        "train.updates": 1,
        "train.epochs": "null",
        "evaluate.every_epochs": "null",
        "evaluate.at_end": "false",
        "report.dir": folder / "runs",
    }
    pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
    command = [sys.executable, "-m", "mtrain", "train", "-c", "yolov5n", "--backend", "ddp", "--nproc-per-node", "2"]
    began = time.time()
    subprocess.run([*command, "--name", "start", *pairs], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    lines = (folder / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()
    return next(r["time"] for r in map(json.loads, lines) if r["kind"] == "update") - began


def peer(root: Path, folder: Path) -> float:
    """The hand-written script under torchrun, one thread per rank."""
    first = folder / "first"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--master-port=29611"]
    script = [str(HERE / "peer_script.py"), "--root", str(root), "--first", str(first)]
    began = time.time()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *script], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    return float(first.read_text()) - began


def dataset(folder: Path) -> Path:
    """Real pictures where they are, else digits."""
    shared = HERE.parent.parent / "shared" / "data" / "bccd"
    if shared.is_dir():
        return shared
    print("../shared/data/bccd is not here: digits instead")
    subprocess.run([sys.executable, "-m", "mtrain", "data", "make", "digits", str(folder / "digits")], check=True)
    return folder / "digits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = dataset(folder)
        pairs = [(ours(root, folder), peer(root, folder)) for _ in range(given.runs + 1)][1:]
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(x / y for x, y in pairs)
    print(f"startup  ours {a:.2f} s  peer {b:.2f} s  ratio {ratio:.2f} (target <= {TARGET})")
    row = {
        "name": "start to first update, 2 ranks",
        "ours": a,
        "peer": b,
        "unit": "s",
        "ratio": ratio,
        "target": TARGET,
        "better": "lower",
    }
    if given.json:
        given.json.write_text(json.dumps([row]))


if __name__ == "__main__":
    main()
