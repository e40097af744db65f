"""CPU seconds that ``mtrain_trace`` adds to an update of YOLOv5n, by turns with and without the recorder, in processes of their
own. The first sixteen updates do not count: most of them record each array by itself, which later ones do rarely.

    python -m benchmarks.trace_overhead [--turns 3] [--updates 20]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

BATCH, FIRST = 8, 16
"""Images of an update, and updates that do not count."""


def train(updates: int) -> None:
    """Print the CPU seconds of an update in a plain loop of torch: forward and backward pass, clipping and step."""
    import torch

    from benchmarks import job

    torch.set_num_threads(1)
    torch.manual_seed(0)
    job.bind("torch")
    model = job.build(BATCH, "yolov5n")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.937, nesterov=True, weight_decay=5e-4)
    batches = job.micro_batches(BATCH, seed=0)
    for update in range(FIRST + updates):
        if update == FIRST:
            begin = time.process_time()
        optimizer.zero_grad()
        model({name: torch.from_numpy(values) for name, values in next(batches).items()})["total"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    seconds = (time.process_time() - begin) / updates
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"seconds": seconds, "parameters": parameters}))


def measure(words: list[str], *, every: int | None) -> dict[str, float]:
    here = [sys.executable, "-m", "benchmarks.trace_overhead", "--once", *words]
    with tempfile.TemporaryDirectory() as folder:
        traced = [
            sys.executable,
            "-m",
            "mtrain_trace",
            "run",
            "--out",
            f"{folder}/t",
            "--every",
            str(every),
            "--",
            *here,
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = subprocess.run(here if every is None else traced, env=env, capture_output=True, text=True, check=True)
    return dict(json.loads(output.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        train(options.updates)
        return
    found: dict[str, list[float]] = {"plain": [], "every update": [], "every 10th": []}
    for _ in range(options.turns):
        for name, every in (("plain", None), ("every update", 1), ("every 10th", 10)):
            result = measure([f"--updates={options.updates}"], every=every)
            found[name].append(result["seconds"])
        ratios = {name: seconds[-1] / found["plain"][-1] for name, seconds in found.items()}
        print("  ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()), flush=True)
    plain = statistics.median(found["plain"])
    print(f"YOLOv5n, {result['parameters']:,.0f} parameters, {BATCH} images of 320 pixels, one thread")
    for name, seconds in found.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, found["plain"], strict=True))
        print(f"{name:>14}: {ratio * plain:.4f} CPU s an update, {ratio:.3f} of plain")


if __name__ == "__main__":
    main()
