"""Measure how long a training waits for data while single files are slow, with four micro batches ahead and with ``auto``.

A sample takes 2 ms, and one in 400 takes 0.8 s, as a busy disk or network has it; the training takes 30 ms for a micro
batch of 8. Times are sleeps, so the metrics hold on any machine that is not overloaded.

    python benchmarks/prefetch.py [--updates 300]
"""

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mtrain.data.loader.pool import WorkerPool
from mtrain.data.loader.shared_memory import ArraySpec

MICRO_BATCH, USE_S, SAMPLE_S, STALL_S, STALLS_EVERY = 8, 0.03, 0.002, 0.8, 400


class Stalling:
    """A source whose samples are slow now and then."""

    array = ArraySpec("images", (64, 64, 3))

    def __len__(self) -> int:
        return 1 << 30

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        return self.array.shape

    def sample(self, epoch: int, index: int, *, update: int = 0) -> Any:
        raise NotImplementedError("the loader fills")

    def fill(self, epoch: int, index: int, out: np.ndarray, *, update: int) -> int:
        time.sleep(STALL_S if index % STALLS_EVERY == STALLS_EVERY - 1 else SAMPLE_S)
        out[...] = index % 256
        return index

    def collate(self, samples: Any) -> dict[str, np.ndarray]:
        return {"index": np.array(samples)}

    def describe(self, index: int) -> str:
        return str(index)


def waited(prefetch: Any, updates: int) -> float:
    """Return the seconds of waiting for data, after the first ten updates."""
    with closing(WorkerPool({"train": Stalling()}, workers=2)) as pool:

        def indices(epoch: int, update: int) -> list[np.ndarray]:
            return [np.arange(MICRO_BATCH) + update * MICRO_BATCH]

        options = {"micro_batch": MICRO_BATCH, "updates_per_epoch": updates, "prefetch": prefetch}
        batches, total = pool.loader("train", indices, **options).micro_batches(0), 0.0
        for update in range(updates):
            start = time.perf_counter()
            next(batches)
            total += time.perf_counter() - start if update >= 10 else 0.0
            time.sleep(USE_S)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    updates = parser.parse_args().updates
    for prefetch in (4, "auto", 4, "auto"):
        print(
            f"data.prefetch {prefetch}: {waited(prefetch, updates):.2f} s of waiting in {updates} updates "
            f"({updates * USE_S:.0f} s of use)",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
