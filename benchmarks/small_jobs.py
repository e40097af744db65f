"""CPU seconds of whole small jobs of 20 updates, every process included: a script with mtrain against the same with a bare loop,
Accelerate and Lightning Fabric, by turns; medians.

    python -m benchmarks.small_jobs [--rounds 7] [--json rows.json]

mtrain writes what it always writes: records, a checkpoint, TensorBoard events, the image of the curves and, under ``mtrain
run``, a report. The others write nothing.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

BASE = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
DATA = """
import sys

import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(160, 16, generator=generator)
        self.classes = torch.randint(0, 4, (160,), generator=generator)

    def __len__(self):
        return 160

    def __getitem__(self, index):
        return self.inputs[index], self.classes[index]


def network():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(ranks):
    return torch.utils.data.DataLoader(Samples(), batch_size=8 // ranks, shuffle=True)
"""
LOOP = """
for inputs, classes in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), classes)
    {backward}
    optimizer.step()
print(loss.item())
"""
SCRIPTS = {
    "bare": """
model, loader = network(), batches(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
    + LOOP.format(backward="loss.backward()"),
    "fabric": """
from lightning_fabric import Fabric

ranks = int(sys.argv[1])
fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
fabric.launch()
fabric.seed_everything(0)
model = network()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
loader = fabric.setup_dataloaders(batches(ranks))
"""
    + LOOP.format(backward="fabric.backward(loss)"),
    "accelerate": """
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
set_seed(0)
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, batches(int(sys.argv[1])))
"""
    + LOOP.format(backward="accelerator.backward(loss)")
    + "accelerator.end_training()\n",
    "mtrain": """
import mtrain

with mtrain.session() as session:
    model, optimizer = session.prepare(network, optimizer=mtrain.AdamW(learning_rate=1e-2))
    for inputs, classes in session.batches(Samples(), global_batch=8, epochs=1):
        loss = nn.functional.cross_entropy(model(inputs), classes)
        optimizer.update(loss)
    session.print(loss.item())
""",
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29613")
RUN = (sys.executable, "-m", "mtrain", "run")
COMMANDS: Mapping[str, Sequence[str]] = {
    "bare, 1 rank": (sys.executable, "bare.py"),
    "fabric, 1 rank": (sys.executable, "fabric.py", "1"),
    "accelerate, 1 rank": (sys.executable, "accelerate_.py", "1"),
    "mtrain, 1 rank, python": (sys.executable, "mtrain_.py"),
    "mtrain, 1 rank, mtrain run": (*RUN, "--backend", "solo", "mtrain_.py"),
    "fabric, 2 ranks": (sys.executable, "fabric.py", "2"),
    "accelerate, 2 ranks": (*TORCHRUN, "accelerate_.py", "2"),
    "mtrain, 2 ranks, mtrain run": (*RUN, "--backend", "ddp", "--nproc-per-node", "2", "mtrain_.py"),
}
FILES = {"bare": "bare.py", "fabric": "fabric.py", "accelerate": "accelerate_.py", "mtrain": "mtrain_.py"}
"""A script must not hide the package that it imports."""
NEEDS = {"fabric": "lightning_fabric", "accelerate": "accelerate"}
PAIRS = (
    ("mtrain, 1 rank, python", "fabric, 1 rank"),
    ("mtrain, 1 rank, python", "accelerate, 1 rank"),
    ("mtrain, 1 rank, python", "bare, 1 rank"),
    ("mtrain, 1 rank, mtrain run", "fabric, 1 rank"),
    ("mtrain, 1 rank, mtrain run", "accelerate, 1 rank"),
    ("mtrain, 2 ranks, mtrain run", "fabric, 2 ranks"),
    ("mtrain, 2 ranks, mtrain run", "accelerate, 2 ranks"),
)
"""What is compared with whom; a job with a peer of mtrain's kind shall take fewer seconds."""


def children_s() -> float:
    """Return the CPU seconds of the children of this process that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cpu_s(command: Sequence[str], folder: Path) -> float:
    """Run a command; return the CPU seconds of all its processes, also of those that nobody has waited for."""
    before = children_s()
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(BASE)}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return children_s() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # Processes whose parent has ended become children of this one, or Fabric's ranks would not be counted.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    missing = {name for name, package in NEEDS.items() if find_spec(package) is None}
    commands = {name: command for name, command in COMMANDS.items() if name.partition(",")[0] not in missing}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for script, text in SCRIPTS.items():
            (folder / FILES[script]).write_text(DATA + text)
        for number in range(arguments.rounds + 1):
            for case in list(commands) if number % 2 else list(commands)[::-1]:
                taken = cpu_s(commands[case], folder)
                if number:  # the first round reads files from the disk
                    seconds[case].append(taken)
    for case, values in seconds.items():
        print(f"{case}: {statistics.median(values):.2f} s CPU ({min(values):.2f} to {max(values):.2f})")
    rows = []
    for ours, peer in PAIRS:
        if peer not in seconds:
            continue
        ratio = statistics.median(a / b for a, b in zip(seconds[ours], seconds[peer], strict=True))
        row = {
            "name": f"20 updates, {ours} / {peer}",
            "ours": statistics.median(seconds[ours]),
            "peer": statistics.median(seconds[peer]),
            "unit": "s CPU",
            "ratio": ratio,
            "target": None if peer.startswith("bare") else 1.0,
            "better": "lower",
        }
        print(f"{row['name']}: ratio {ratio:.2f}")
        rows.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
