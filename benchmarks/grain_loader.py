"""Measure mtrain's loader beside Google's grain, with the same samples: one worker process each, in alternating blocks.

Both call the same source for each sample (mosaic of four at 640 with zoom, shift, hsv and flip) and yield uint8 batches
of 16. Needs grain, which no part of mtrain does: `pip install grain`.

    python benchmarks/grain_loader.py [--rounds 9]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.loader import BATCH, BATCHES, BCCD, glance, images, loader, mosaics
from mtrain.tasks.detection.section import AugmentSpec
from mtrain.tasks.detection.source import DetectionSource

SIDE = 640
PASSES = 15
"""Passes of a block; grain keeps some batches ready, which must not be a large part of a block."""


class Drawn:
    """The samples of a pass in the form of a source of grain: item i is image i, augmented."""

    def __init__(self, annotations: Any) -> None:
        self._source = DetectionSource(annotations, image_size=SIDE, augment=AugmentSpec())
        self._length = len(annotations)

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> Any:
        return self._source.sample(0, index % self._length)

    def together(self, samples: Any) -> Any:
        """Join samples as mtrain does."""
        return self._source.collate(samples)


def seconds(batches: Iterable[Any], look: Callable[[Any], object]) -> float:
    """Return the seconds in which the batches arrive."""
    start = time.perf_counter()
    for batch in batches:
        look(batch)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        annotations, what = images(Path(folder), BCCD)
        pool, ours = loader(mosaics(annotations, SIDE, cache="none"), len(annotations))
        import grain

        drawn = Drawn(annotations)
        dataset = grain.MapDataset.source(drawn).batch(BATCH, batch_fn=drawn.together).repeat()
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        workers = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=2)
        peer = iter(dataset.to_iter_dataset(reading).mp_prefetch(workers))
        times: dict[str, list[float]] = {"ours": [], "grain": []}
        for turn in range(options.rounds + 1):
            own = sum(seconds(ours.micro_batches(turn * PASSES + i), glance) for i in range(PASSES))
            theirs = seconds((next(peer) for _ in range(PASSES * BATCHES)), glance)
            if turn:
                times["ours"].append(own)
                times["grain"].append(theirs)
        pool.close()
    ratio = statistics.median(b / a for a, b in zip(times["ours"], times["grain"], strict=True))
    own, theirs = (PASSES * BATCH * BATCHES / statistics.median(values) for values in times.values())
    print(f"ours {own:.1f}/s  grain {theirs:.1f}/s  ratio {ratio:.2f}  ({what}, one worker each)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
