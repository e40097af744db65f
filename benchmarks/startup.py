"""Measure the time from the command to the end of the first update, and the CPU time of all processes until then: mtrain
against the hand-written script of each library, in turn; medians."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

HERE = Path(__file__).parent


def cpu_seconds(command: list[str], *, until: Callable[[], bool], env: Mapping[str, str], cwd: Path) -> float:
    """Run a command to its end; return the CPU seconds that its processes had taken when ``until`` became true."""
    taken = None
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with psutil.Popen(command, env=env, cwd=cwd, **quiet) as process:
        while process.poll() is None:
            if taken is None and until():
                taken = 0.0
                for each in [process, *process.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        taken += sum(each.cpu_times()[:4])  # its own, and those of children that have ended
            time.sleep(0.01)
    if process.returncode or taken is None:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return taken


def ours(root: Path, folder: Path) -> tuple[float, float]:
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
    records = folder / "runs" / f"start-{time.monotonic_ns()}" / "metrics.jsonl"

    def updates() -> list[float]:
        lines = records.read_text().splitlines(keepends=True) if records.exists() else []
        rows = (json.loads(line) for line in lines if line.endswith("\n"))
        return [row["time"] for row in rows if row["kind"] == "update"]

    began = time.time()
    named = [*command, "--name", records.parent.name, *pairs]
    taken = cpu_seconds(named, until=lambda: bool(updates()), env=os.environ, cwd=folder)
    return updates()[0] - began, taken


TORCHRUN = ("-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--master-port=29611")
STARTERS = {
    "torch": TORCHRUN,
    "accelerate": TORCHRUN,  # `accelerate launch` needs MPI on the CPU
    "fabric": ("-m", "lightning_fabric.cli", "--accelerator=cpu", "--strategy=ddp", "--devices=2"),
}
TARGETS = {"torch": 0.7, "accelerate": 0.7, "fabric": 0.7}
NEEDS = {"torch": "torch", "accelerate": "accelerate", "fabric": "lightning_fabric"}
TITLES = {"torch": "torchrun and DDP", "accelerate": "Accelerate under torchrun", "fabric": "fabric run"}


def peer(library: str, root: Path, folder: Path) -> tuple[float, float]:
    """Time the hand-written script with its own starter, one thread per rank."""
    first = folder / f"first-{time.monotonic_ns()}"
    script = [str(HERE / "peers" / "script.py"), "--root", str(root), "--first", str(first), "--library", library]
    began = time.time()
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, *STARTERS[library], *script]
    taken = cpu_seconds(command, until=lambda: first.exists() and bool(first.read_text()), env=env, cwd=folder)
    return float(first.read_text()) - began, taken


def dataset(folder: Path) -> Path:
    """Return real images if they are available, else digits."""
    shared = HERE.parent.parent / "shared" / "data" / "bccd"
    if shared.is_dir():
        return shared
    print("../shared/data/bccd is not here: digits instead")
    subprocess.run([sys.executable, "-m", "mtrain", "data", "make", "digits", str(folder / "digits")], check=True)
    return folder / "digits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--libraries", nargs="*", default=list(STARTERS), choices=list(STARTERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = dataset(folder)
        libraries = [name for name in arguments.libraries if find_spec(NEEDS[name])]
        rounds = [
            (ours(root, folder), {name: peer(name, root, folder) for name in libraries})
            for _ in range(arguments.runs + 1)
        ][1:]
    rows = []
    for name in libraries:
        for number, (measure, suffix) in enumerate((("start to first update", ""), ("CPU time of the start", " CPU"))):
            pairs = [(x[number], y[name][number]) for x, y in rounds]
            a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(x / y for x, y in pairs)
            limit = "" if suffix else f" (target <= {TARGETS[name]})"
            print(f"{measure} / {TITLES[name]}: ours {a:.2f} s  peer {b:.2f} s  ratio {ratio:.2f}{limit}")
            unit, target = f"s{suffix}", None if suffix else TARGETS[name]
            rows.append(
                {
                    "name": f"{measure} / {TITLES[name]}",
                    "ours": a,
                    "peer": b,
                    "unit": unit,
                    "ratio": ratio,
                    "target": target,
                    "better": "lower",
                }
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
