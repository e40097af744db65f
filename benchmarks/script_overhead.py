"""CPU time of an update in ``mtrain.session`` against a bare loop of torch, on one rank: blocks of updates by turns in one process,
medians of the ratios.

Both loops train the same network with the same rule on the same data set. The bare loop reads it through a ``DataLoader``,
and a second one has its batches ready, so that only forward, backward and step are left.

    python -m benchmarks.script_overhead [--width 24] [--batch 32] [--blocks 30] [--updates 10]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mtrain

TARGETS = {"DataLoader": 1.03, "ready batches": 1.03}
SIZE, CLASSES, RATE = 16, 10, 1e-3


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random samples in memory."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 1, SIZE, SIZE, generator=generator)
        self.classes = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.classes[index]


def network(width: int) -> nn.Module:
    """Build a small classifier of images."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(8 * width, CLASSES)),
    )


def endless(loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader, epoch after epoch."""
    while True:
        yield from loader


class Bare:
    """The loop without mtrain."""

    def __init__(self, width: int, batches: Iterator[Any]) -> None:
        self.model = network(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
        self.batches = batches

    def update(self) -> None:
        """Make one update."""
        inputs, classes = next(self.batches)
        loss = nn.functional.cross_entropy(self.model(inputs), classes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def timed(block: Callable[[], None]) -> float:
    """Return the CPU seconds of a block, all threads of this process included."""
    began = time.process_time()
    block()
    return time.process_time() - began


def measure(width: int, batch: int, blocks: int, updates: int) -> dict[str, list[float]]:
    """Return the milliseconds of an update of each loop in each block."""
    samples = Samples(batch * updates * 20)
    loader = torch.utils.data.DataLoader(samples, batch_size=batch, shuffle=True)
    loops = {
        "DataLoader": Bare(width, endless(loader)),
        "ready batches": Bare(width, endless(list(loader))),
    }
    times: dict[str, list[float]] = {"session": [], **{name: [] for name in loops}}
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: network(width), optimizer=mtrain.AdamW(learning_rate=RATE, weight_decay=0.01)
        )
        batches = session.batches(samples, global_batch=batch, updates=(blocks + 1) * updates + 1)

        def update() -> None:
            inputs, classes = next(batches)
            loss = nn.functional.cross_entropy(model(inputs), classes)
            optimizer.update(loss)

        update()
        each = {"session": update, **{name: loop.update for name, loop in loops.items()}}
        for number in range(blocks + 1):
            order = list(each) if number % 2 else list(each)[::-1]
            for name in order:
                seconds = timed(lambda name=name: [each[name]() for _ in range(updates)])  # type: ignore[misc]
                if number:  # the first block warms up
                    times[name].append(seconds / updates * 1000)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=24, help="of the network; the default takes some 5 ms an update")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--updates", type=int, default=10, help="in a block")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = None if arguments.json is None else arguments.json.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.argv = ["script_overhead.py"]
        times = measure(arguments.width, arguments.batch, arguments.blocks, arguments.updates)
    rows = []
    for name, limit in TARGETS.items():
        ratios = sorted(a / b for a, b in zip(times["session"], times[name], strict=True))
        ours, peer = statistics.median(times["session"]), statistics.median(times[name])
        ratio = statistics.median(ratios)
        middle = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-len(ratios) // 4]:.3f}"
        print(
            f"update of a script / bare loop, {name}: {ours:.2f} ms / {peer:.2f} ms CPU, ratio {ratio:.3f} (target <= {limit}), "
            f"middle half {middle}; least {min(times['session']):.2f} ms / {min(times[name]):.2f} ms"
        )
        rows.append(
            {
                "name": f"update of a script / bare loop, {name}",
                "ours": ours,
                "peer": peer,
                "unit": "ms CPU",
                "ratio": ratio,
                "target": limit,
                "better": "lower",
            }
        )
    if target:
        target.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
