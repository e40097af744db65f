"""CPU seconds that ``mtrain_trace`` adds to an update: a plain torch training of a network of YOLOv5n's size, by turns
with and without the recorder, in processes of their own; medians of the updates after the first nine.

    python -m benchmarks.trace_overhead [--turns 5] [--pixels 320] [--batch 8]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

WIDTHS = (16, 32, 64, 128, 256)


def train(pixels: int, batch: int, updates: int) -> None:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    before = 3
    for width in WIDTHS:
        for stride in (2, 1, 1):
            kernel = 3 if stride == 2 or width < 256 else 1
            parts += [
                nn.Conv2d(before, width, kernel, stride, kernel // 2, bias=False),
                nn.BatchNorm2d(width),
                nn.SiLU(),
            ]
            before = width
    parts += [
        nn.Conv2d(256, 512, 1),
        nn.Conv2d(512, 512, 3, padding=1, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    model = nn.Sequential(*parts, nn.Linear(512, 80))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    images, labels = torch.rand(batch, 3, pixels, pixels), torch.randint(0, 80, (batch,))
    seconds = []
    for _ in range(updates):
        begin = time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        seconds.append(time.process_time() - begin)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"median_s": statistics.median(seconds[9:]), "parameters": parameters}))


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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pixels", type=int, default=320)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        train(options.pixels, options.batch, options.updates)
        return
    words = [f"--pixels={options.pixels}", f"--batch={options.batch}", f"--updates={options.updates}"]
    found: dict[str, list[float]] = {"plain": [], "every update": [], "every 10th": []}
    for _ in range(options.turns):
        for name, every in (("plain", None), ("every update", 1), ("every 10th", 10)):
            result = measure(words, every=every)
            found[name].append(result["median_s"])
    plain = statistics.median(found["plain"])
    print(f"{result['parameters']:,.0f} parameters, {options.batch} images of {options.pixels} pixels, one thread")
    for name, seconds in found.items():
        print(
            f"{name:>14}: {statistics.median(seconds):.4f} CPU s an update, {statistics.median(seconds) / plain:.3f} of plain"
        )


if __name__ == "__main__":
    main()
