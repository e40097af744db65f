"""Measure pictures per second that one loader process delivers: mtrain against a plain torch DataLoader with the same
steps.

Both draw mosaics of four at 640 from 640 x 480 JPEGs, with zoom, shift, hsv, flip and uint8 batches. Blocks of both
alternate in one run; the ratio is the median over rounds. In the first row neither caches pictures; in the second,
mtrain's RAM cache is on and filled.

    python benchmarks/loader.py [--rounds 9] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mtrain.data.loader.pool import ShardedLoader, WorkerPool
from mtrain.tasks.detection.annotations import Annotations, Picture, assemble
from mtrain.tasks.detection.readers.coco import Coco
from mtrain.tasks.detection.section import AugmentSpec, DetectionDataSpec
from mtrain.tasks.detection.source import DetectionSource

BCCD = Path(__file__).parents[2] / "shared" / "data" / "bccd"
SIDE, BATCH, BATCHES = 640, 16, 6
TARGET = 2.0


def pictures(folder: Path) -> tuple[Annotations, str]:
    """Return blood cell pictures if that data set lies beside the project, else variants of scikit-learn's
    photographs."""
    if BCCD.is_dir():
        return Coco(Coco.Options()).read(BCCD, None, None, None, split="train"), "bccd, 640 x 480"
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    generated = []
    for i in range(60):
        photo = cv2.resize(load_sample_images().images[i % 2], (640, 480))
        photo = np.roll(photo, tuple(rng.integers(480, size=2)), axis=(0, 1))
        path = folder / f"{i:03}.jpg"
        cv2.imwrite(str(path), photo, [cv2.IMWRITE_JPEG_QUALITY, 90])
        boxes = np.concatenate([rng.uniform(0, 380, (12, 2)), rng.uniform(20, 100, (12, 2))], axis=1)
        no_crowd = np.zeros(12, dtype=bool)
        generated.append(
            Picture(path, path.name, i, 640, 480, boxes, rng.integers(3, size=12), no_crowd, boxes[:, 2:].prod(1))
        )
    return assemble(generated, class_names="abc", category_ids=(1, 2, 3)), "photographs, 640 x 480"


def loader(annotations: Annotations, *, cache: str) -> tuple[WorkerPool, ShardedLoader]:
    source = DetectionSource(annotations, image_size=SIDE, augment=AugmentSpec())
    source.pictures.keep(DetectionDataSpec(cache=cache).cache)
    pool = WorkerPool({"train": source}, workers=1)

    def indices(epoch: int, update: int) -> list[Any]:
        first = (epoch * BATCHES + update) * BATCH
        return [np.arange(first, first + BATCH) % len(annotations)]

    return pool, pool.loader("train", indices, micro_batch=BATCH, updates_per_epoch=BATCHES, prefetch=2)


def seconds(batches: Iterable[Any], look: Callable[[Any], object]) -> float:
    """Time one pass over the batches; each one is read, so that it has arrived."""
    start = time.perf_counter()
    for batch in batches:
        look(batch)
    return time.perf_counter() - start


def glance(batch: Mapping[str, np.ndarray]) -> object:
    """Read a part of one of mtrain's batches."""
    return batch["images"][:, ::64].max()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        annotations, what = pictures(Path(folder))
        # Our workers are forked before torch is imported, as in a job.
        pools = {name: loader(annotations, cache=name) for name in ("none", "ram")}
        from benchmarks.peers.loader import data_loader

        peer = data_loader(annotations.samples, SIDE, AugmentSpec(), batch=BATCH, count=BATCH * BATCHES)
        times: dict[str, list[float]] = {"none": [], "ram": [], "peer": []}
        fill = -(-len(annotations) // (BATCH * BATCHES)) + 1
        for turn in range(fill + options.rounds):
            pass_times = {name: seconds(one.micro_batches(turn), glance) for name, (_, one) in pools.items()}
            pass_times["peer"] = seconds(peer, lambda batch: batch[0].numpy()[:, :, ::64].max())
            if turn >= fill:  # earlier passes warm up and fill the RAM cache
                for name, value in pass_times.items():
                    times[name].append(value)
        for pool, _ in pools.values():
            pool.close()
    count = BATCH * BATCHES
    rows = []
    for name, title, target in (("none", "loader", TARGET), ("ram", "loader, pictures in RAM", TARGET)):
        ratio = statistics.median(b / a for a, b in zip(times[name], times["peer"], strict=True))
        ours, theirs = (count / statistics.median(times[key]) for key in (name, "peer"))
        print(f"{title:<26} ours {ours:6.1f}/s  peer {theirs:6.1f}/s  ratio {ratio:.2f} (target >= {target})")
        figures = {"ours": ours, "peer": theirs, "ratio": ratio, "target": target}
        rows.append({"name": title, "unit": "pictures/s", "better": "higher", **figures})
    print(
        f"mosaic of four at {SIDE} from {len(annotations)} pictures ({what}); one worker each, {count} pictures a round"
    )
    if options.json:
        options.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
