"""Measure seconds from the command to the end of the first update: mtrain against the hand-written script of each
library, in turn; medians."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent


def ours(root: Path, folder: Path) -> float:
    """Time ``mtrain train`` as a user types it, with everything switched on."""
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


TORCHRUN = ("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--master-port=29611")
STARTERS = {
    "torch": TORCHRUN,
    "accelerate": TORCHRUN,  # `accelerate launch` needs MPI on the CPU
    "fabric": ("-m", "lightning_fabric.cli", "--accelerator=cpu", "--strategy=ddp", "--devices=2"),
}
TARGETS = {"torch": 1.3, "accelerate": 1.0, "fabric": 1.0}
NEEDS = {"torch": "torch", "accelerate": "accelerate", "fabric": "lightning_fabric"}
TITLES = {"torch": "torchrun and DDP", "accelerate": "Accelerate under torchrun", "fabric": "fabric run"}


def peer(library: str, root: Path, folder: Path) -> float:
    """Time the hand-written script with its own starter, one thread per rank."""
    first = folder / "first"
    script = [str(HERE / "peers" / "script.py"), "--root", str(root), "--first", str(first), "--library", library]
    began = time.time()
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, *STARTERS[library], *script]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    return float(first.read_text()) - began


def dataset(folder: Path) -> Path:
    """Return real pictures if they are available, else digits."""
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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = dataset(folder)
        libraries = [name for name in STARTERS if find_spec(NEEDS[name])]
        rounds = [
            (ours(root, folder), {name: peer(name, root, folder) for name in libraries})
            for _ in range(arguments.runs + 1)
        ][1:]
    rows = []
    for name in libraries:
        a, b = (statistics.median(column) for column in zip(*((x, y[name]) for x, y in rounds), strict=True))
        ratio = statistics.median(x / y[name] for x, y in rounds)
        print(f"start / {TITLES[name]}: ours {a:.2f} s  peer {b:.2f} s  ratio {ratio:.2f} (target <= {TARGETS[name]})")
        rows.append(
            {
                "name": f"start to first update / {TITLES[name]}",
                "ours": a,
                "peer": b,
                "unit": "s",
                "ratio": ratio,
                "target": TARGETS[name],
                "better": "lower",
            }
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
