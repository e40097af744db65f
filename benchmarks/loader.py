"""Measure what an image costs that one loader process delivers: mtrain against a plain torch DataLoader with the same
steps, and against the loader of the original YOLOv5 where its checkout is named.

All draw mosaics of four at 640 from 640 x 480 JPEGs, with zoom, shift, hsv, flip and uint8 batches; with ``--task`` the
peers are torchvision's transforms v2 and SPDL, and all draw random windows or letterboxed images, flipped by chance.
Blocks of all alternate in one run. A ratio is the median over rounds of the other's CPU seconds (its worker's, and this process's
while it reads) over mtrain's, with the least and the largest; images per second are of one CPU second. In the first
rows no one caches images; in the last, mtrain's RAM cache is on and filled.

    python benchmarks/loader.py [--rounds 9] [--side 640] [--coco FOLDER] [--yolov5 CHECKOUT] [--json FILE]
    python benchmarks/loader.py --task crop --side 224
"""

import argparse
import atexit
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from mtrain.core.interfaces import SplitRequest
from mtrain.data.loader.pool import ShardedLoader, WorkerPool
from mtrain.tasks.classification.images import EncodedImages
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.section import ClassificationAugmentSpec
from mtrain.tasks.classification.source import ClassificationSource
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.cache_size import Sizing
from mtrain.tasks.detection.readers.coco import Coco
from mtrain.tasks.detection.section import AugmentSpec, DetectionDataSpec
from mtrain.tasks.detection.source import DetectionSource

BCCD = Path(__file__).parents[2] / "shared" / "data" / "bccd"
BATCH, BATCHES = 16, 6
TARGET = 2.0


def images(folder: Path, coco: Path) -> tuple[Annotations, str]:
    """Return the training images of a data set in COCO's form if it is there, else variants of scikit-learn's
    photographs."""
    if coco.is_dir():
        return Coco(Coco.Options()).read(SplitRequest(root=coco, split="train")), str(coco)
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
            AnnotatedImage(
                path, path.name, i, 640, 480, boxes, rng.integers(3, size=12), no_crowd, boxes[:, 2:].prod(1)
            )
        )
    return assemble(generated, class_names="abc", category_ids=(1, 2, 3)), "photographs, 640 x 480"


def mosaics(annotations: Annotations, side: int, *, cache: str) -> DetectionSource:
    source = DetectionSource(annotations, image_size=side, augment=AugmentSpec())
    source.images.keep(DetectionDataSpec(cache=cache).cache)
    return source


def single(annotations: Annotations, options: argparse.Namespace) -> Any:
    """Return a source of random windows, or of letterboxed images, which are flipped by chance and not changed otherwise."""
    if options.task == "letterbox":
        still = AugmentSpec(mosaic=0, translate=0, scale=0, hsv_h=0, hsv_s=0, hsv_v=0)
        return DetectionSource(annotations, image_size=options.side, augment=still)
    paths = [str(sample.path) for sample in annotations.samples]
    split = LabelledImages(EncodedImages(paths), np.zeros(len(paths), np.int64), ("any",), paths)
    return ClassificationSource(split, side=options.side, resize="crop", augment=ClassificationAugmentSpec())


def loader(source: Any, count: int) -> tuple[WorkerPool, ShardedLoader]:
    pool = WorkerPool({"train": source}, workers=1)

    def indices(epoch: int, update: int) -> list[Any]:
        first = (epoch * BATCHES + update) * BATCH
        return [np.arange(first, first + BATCH) % count]

    return pool, pool.loader("train", indices, micro_batch=BATCH, updates_per_epoch=BATCHES, prefetch=2)


@dataclass(slots=True)
class Runner:
    """One of the loaders that take turns."""

    batches: Callable[[int], Iterable[Any]]
    """Returns the batches of a pass."""
    look: Callable[[Any], object]
    """Reads a part of a batch, so that it has arrived."""
    workers: list[int]
    """Ids of its processes."""
    spent: float = 0.0
    """CPU seconds of this process during its passes."""

    def total(self) -> float:
        """Return all CPU seconds of it so far; a worker that runs ahead works during the turns of others, too."""
        return self.spent + sum(map(cpu_seconds, self.workers))

    def run(self, turn: int) -> None:
        """Read one pass."""
        start = time.process_time()
        for batch in self.batches(turn):
            self.look(batch)
        self.spent += time.process_time() - start


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, of all its threads, also of those that have ended (Linux)."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's number of that clock, as of clock_getcpuclockid(3)


def started(make: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return what ``make`` returns, and the processes that it has started."""
    before = {child.pid for child in psutil.Process().children()}
    made = make()
    return made, [child.pid for child in psutil.Process().children() if child.pid not in before]


def glance(batch: Mapping[str, np.ndarray]) -> object:
    """Read a part of one of mtrain's batches."""
    return batch["images"][:, ::64].max()


def runners(annotations: Annotations, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Runner], list[Any]]:
    """Start all loaders; return them, and the pools to close. Ours are forked before torch is imported, as in a job."""
    found, pools = {}, []
    for name in ("none", "ram"):
        pool, ours = loader(mosaics(annotations, options.side, cache=name), len(annotations))
        pools.append(pool)
        found[name] = Runner(ours.micro_batches, glance, pool.pids)
    from benchmarks.peers.loader import data_loader

    peer = data_loader(annotations.samples, options.side, AugmentSpec(), batch=BATCH, count=BATCH * BATCHES)
    _, pids = started(lambda: iter(peer))
    found["peer"] = Runner(lambda _: peer, lambda batch: batch[0].numpy()[:, :, ::64].max(), pids)
    if options.yolov5:
        from benchmarks.peers.yolov5_loader import Passes, original_loader, written

        images = written(annotations.samples, folder / "yolo")
        original, pids = started(lambda: original_loader(options.yolov5, images, options.side, batch=BATCH))
        passes = Passes(original, BATCHES)
        found["yolov5"] = Runner(lambda _: passes, lambda batch: batch[0].numpy()[:, :, ::64].max(), pids)
    return found, pools


def apart(make: Callable[[], Iterable[Any]]) -> Runner:
    """Let a process read the passes itself that ``make`` returns: threads cannot be counted apart from other loaders'."""
    ours, theirs = multiprocessing.Pipe()

    def serve() -> None:
        passes = make()
        while theirs.recv():
            theirs.send(sum(int(batch[:, ::64].max()) for batch in passes))

    process = multiprocessing.get_context("fork").Process(target=serve, daemon=True)
    process.start()
    atexit.register(process.kill)  # SPDL answers SIGTERM with stacks

    def ask(_: int) -> list[Any]:
        ours.send(True)
        return [ours.recv()]

    return Runner(ask, lambda _: None, [process.pid or 0])


def single_runners(annotations: Annotations, options: argparse.Namespace) -> tuple[dict[str, Runner], list[Any]]:
    """Do what ``runners`` does for ``--task``."""
    pool, ours = loader(single(annotations, options), len(annotations))
    found = {"none": Runner(ours.micro_batches, glance, pool.pids)}
    from benchmarks.peers.image_loaders import SpdlPasses, torchvision_loader

    given = [str(sample.path) for sample in annotations.samples], options.side, options.task
    for name in ("SPDL", "SPDL with torchvision"):
        found[name] = apart(
            partial(SpdlPasses, *given, batch=BATCH, count=BATCH * BATCHES, by_torchvision=name != "SPDL")
        )
    data_loader = torchvision_loader(*given, batch=BATCH, count=BATCH * BATCHES)
    _, pids = started(lambda: iter(data_loader))
    found["torchvision"] = Runner(lambda _: data_loader, lambda batch: batch.numpy()[:, :, ::64].max(), pids)
    return found, [pool]


def costs(found: Mapping[str, Runner], *, fill: int, rounds: int) -> dict[str, list[float]]:
    """Return each loader's CPU seconds in each round, from the start of its turn to the start of its next one."""
    marks: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(fill + rounds + 1):  # the first passes warm up and fill the RAM cache
        for name, runner in found.items():
            if turn >= fill:
                marks[name].append(runner.total())
            runner.run(turn)
    return {name: np.diff(values).tolist() for name, values in marks.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--task", choices=("mosaic", "crop", "letterbox"), default="mosaic")
    parser.add_argument("--whole", action="store_true", help="decode no JPEG at a half of its size or less")
    parser.add_argument("--side", type=int, default=640)
    parser.add_argument("--coco", type=Path, default=BCCD, help="folder of a data set in COCO's form")
    parser.add_argument("--yolov5", type=Path, help="checkout of ultralytics/yolov5")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        annotations, what = images(Path(folder), options.coco)
        if options.whole:
            Sizing.reduction = lambda *_: 1  # type: ignore[method-assign]
        mosaic = options.task == "mosaic"
        found, pools = runners(annotations, options, Path(folder)) if mosaic else single_runners(annotations, options)
        fill = -(-len(annotations) // (BATCH * BATCHES)) + 1
        seconds = costs(found, fill=fill, rounds=options.rounds)
        for pool in pools:
            pool.close()
    if mosaic:
        rows = [row(seconds, "none", "peer", "loader"), row(seconds, "ram", "peer", "loader, images in RAM")]
    else:
        rows = [row(seconds, "none", peer, f"loader / {peer}", target=1.0) for peer in seconds if peer != "none"]
    if options.yolov5:
        rows.append(row(seconds, "none", "yolov5", "loader / the original YOLOv5's"))
    print(
        f"{options.task} at {options.side} from {len(annotations)} images ({what}); one worker each, {BATCH * BATCHES} "
        f"images a round, {options.rounds} rounds"
    )
    if options.json:
        options.json.write_text(json.dumps(rows))
    return 0


def row(
    seconds: Mapping[str, list[float]], ours: str, peer: str, title: str, *, target: float = TARGET
) -> dict[str, Any]:
    """Print and return one comparison."""
    ratios = sorted(b / a for a, b in zip(seconds[ours], seconds[peer], strict=True))
    ratio, count = statistics.median(ratios), BATCH * BATCHES
    mine, theirs = (count / statistics.median(seconds[name]) for name in (ours, peer))
    print(
        f"{title:<31} ours {mine:6.1f}/s  peer {theirs:6.1f}/s  ratio {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}; "
        f"target >= {target})"
    )
    metrics = {"ours": mine, "peer": theirs, "ratio": ratio, "target": target}
    return {"name": title, "unit": "images/CPU s", "better": "higher", **metrics}


if __name__ == "__main__":
    sys.exit(main())
