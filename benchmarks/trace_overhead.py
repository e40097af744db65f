"""CPU seconds that ``mtrain_trace`` adds to an update of YOLOv5n, in one process that records some updates and others not.

Updates take turns: without the recorder, with what every update has (loss, samples, settings), with gradients, weights,
moments and buffers besides, and with each array by itself. A busy machine slows neighbouring updates alike, so each is
divided by the plain one of its own turn, and the median of these ratios is told, with the memory and the bytes on disk.

    python -m benchmarks.trace_overhead [--turns 10]
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import mtrain_trace
from benchmarks import job
from mtrain_trace import torch_hooks

BATCH, EVERY = 8, 10
"""Images of an update; how rarely ``--every 10`` records the arrays."""
KINDS = {"plain": None, "settings": (False, False), "every update": (True, False), "each array": (True, True)}
"""Kinds of updates -> whether the recorder takes them for full ones, and for detailed ones; None: it sleeps."""


class Training:
    """A plain loop of torch: forward and backward pass, clipping and step."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        job.bind("torch")
        self.model: Any = job.build(BATCH, "yolov5n")
        rule = {"lr": 1e-4, "momentum": 0.937, "nesterov": True, "weight_decay": 5e-4}
        self.optimizer = torch.optim.SGD(self.model.parameters(), **rule)
        self.batches = job.micro_batches(BATCH, seed=0)

    def update(self) -> float:
        """Make an update, and return its CPU seconds."""
        samples = {name: torch.from_numpy(values) for name, values in next(self.batches).items()}
        begin = time.process_time()
        self.optimizer.zero_grad()
        self.model(samples)["total"].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.optimizer.step()
        return time.process_time() - begin


def measure(turns: int, folder: str) -> dict[str, list[float]]:
    """Return the CPU seconds of the updates of each kind."""
    recorder = mtrain_trace.attach(folder)
    training = Training()
    awake = torch_hooks._attempt[0]
    torch_hooks._attempt[0] = lambda *_: None
    for _ in range(3):
        training.update()
    plain_kib = peak_kib()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(turns + 1):
        for kind, asked in KINDS.items():
            torch_hooks._attempt[0] = awake if asked else lambda *_: None
            if asked:
                recorder.is_full = lambda _, full=asked[0]: full  # type: ignore[method-assign]
                recorder.is_detailed = lambda _, detailed=asked[1]: detailed  # type: ignore[method-assign]
            # What an update has shown is written at the beginning of the next one, so each of these kinds is made twice.
            if asked:
                training.update()
            seconds = training.update()
            if turn:  # the first turn lays out the arrays and fills caches
                found[kind].append(seconds)
        if turn:
            shown = (f"{kind} {seconds[-1] / found['plain'][-1]:.3f}" for kind, seconds in found.items())
            print("  ".join(shown), flush=True)
    torch_hooks._attempt[0] = awake
    recorder.close()
    print(f"peak memory: {(peak_kib() - plain_kib) / 1024:.1f} MiB more than {plain_kib / 1024:.0f}")
    for file in sorted(Path(folder).glob("*/*.jsonl")):
        lines = file.read_bytes().splitlines()
        print(f"{file.name}: {statistics.mean(map(len, lines)) / 1024:.1f} KiB a record")
    return found


def peak_kib() -> int:
    """Return the largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder:
        found = measure(turns, folder)
    ratios = {k: [a / b for a, b in zip(seconds, found["plain"], strict=True)] for k, seconds in found.items()}
    rare = [((EVERY - 1) * a + b) / EVERY for a, b in zip(ratios["settings"], ratios["every update"], strict=True)]
    ratios[f"--every {EVERY}"] = rare
    plain = statistics.median(found["plain"])
    print(
        f"YOLOv5n, {BATCH} images of 320 pixels, clipped SGD, one thread, {turns} turns; load {os.getloadavg()[0]:.0f}"
    )
    for kind, values in ratios.items():
        low, _, high = statistics.quantiles(values, n=4)
        print(
            f"{kind:>14}: {statistics.median(values):.3f} of plain ({plain:.3f} CPU s); quartiles {low:.3f} {high:.3f}"
        )


if __name__ == "__main__":
    main()
