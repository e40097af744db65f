"""Measure the CPU time per update that exact BatchNorm costs: the shipped network as it trains, against torch's own
kernel in its place.

One process with one thread trains YOLOv5n at 320 px, micro batches of 8, channels last: forward and backward pass,
clipping, SGD. Each update with torch's kernel is followed by one with mtrain's sums on the same batch; the metric is
the median of the pairs' ratios. CPU time of this process is counted, so that other work on the machine disturbs little.
There is no target: docs/accuracy.md describes the benefit.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BATCH, RATE, MOMENTUM, CLIP, WARMUP = 8, 1e-4, 0.9, 10.0, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("/dev/null"))
    parser.add_argument("--updates", type=int, default=40, help="number of updates with each kernel")
    options = parser.parse_args()
    exact, native = measured(options.updates)
    row = {
        "name": "update, exact BatchNorm",
        "ours": median(exact) * 1000,
        "peer": median(native) * 1000,
        "unit": "ms of CPU",
        "ratio": median(a / b for a, b in zip(exact, native, strict=True)),
        "target": None,
        "better": "lower",
    }
    print(f"exact {row['ours']:.0f} ms, torch's own {row['peer']:.0f} ms, median of the ratios {row['ratio']:.3f}")
    options.json.write_text(json.dumps([row]))
    return 0


def measured(updates: int) -> tuple[list[float], list[float]]:
    """Return the seconds of CPU time of each update with exact sums, and with torch's own kernel."""
    import torch

    from mtrain.backends._torch import batchnorm

    torch.set_num_threads(1)
    update = training()
    use_exact, use_native = batchnorm.needs_blocks, lambda x_BCHW: False
    for number in range(WARMUP):
        update(number)
    times: dict[Callable, list[float]] = {use_native: [], use_exact: []}
    for number in range(updates):
        for rule, seconds in times.items():
            batchnorm.needs_blocks = rule
            started = time.process_time()
            update(number)
            seconds.append(time.process_time() - started)
    return times[use_exact], times[use_native]


def training() -> Callable[[int], None]:
    """Return a function that trains one update, on one of two batches in turn."""
    import torch

    from benchmarks import job

    job.bind()
    model = job.build(BATCH)
    values = job.start_values({name: tuple(x.shape) for name, x in model.state_dict().items()}, BATCH)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in values.items()}, strict=False)
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    source = job.micro_batches(BATCH, seed=0)
    batches = [{name: torch.from_numpy(x) for name, x in next(source).items()} for _ in range(2)]

    def update(number: int) -> None:
        model(dict(batches[number % 2]))["total"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return update


if __name__ == "__main__":
    sys.exit(main())
