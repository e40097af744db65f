"""How the cost of the order of samples, and of annotations, grows with the samples of a data set.

The order is measured by itself: no file is behind the indices. Annotations are synthetic, in COCO's form. Each row is a
process of its own, so that its peak of memory is its own.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.growth import forked

ORDER_SIZES = (10_000, 1_000_000, 16_777_216, 100_000_000, 1_000_000_000)
BOX_SIZES = (10_000, 100_000, 860_000)
SHARED_SIZES = ((200_000, 1), (200_000, 2), (200_000, 4))
"""(boxes, ranks)"""
GLOBAL_BATCH = 1024
ROOT = Path(__file__).parents[2]


def order(length: int) -> dict[str, Any]:
    """Measure the first update's samples, those of an update in the middle, and a resumed position."""
    from mtrain.core.samples.sampler import Shuffled

    before = psutil.Process().memory_info().rss
    sampler = Shuffled(length, global_batch=min(GLOBAL_BATCH, length), seed=1)
    row: dict[str, Any] = {"samples": length}
    last = sampler.updates_per_epoch - 1
    began = time.process_time()
    sampler.global_batch_indices(0, 0)
    row["first_update_cpu_s"] = time.process_time() - began
    for name, update in (("early_update_cpu_ms", min(1, last)), ("late_update_cpu_ms", last)):
        began = time.process_time()
        sampler.global_batch_indices(0, update)
        row[name] = (time.process_time() - began) * 1e3
    resumed = Shuffled(length, global_batch=min(GLOBAL_BATCH, length), seed=1)
    began = time.process_time()
    resumed.global_batch_indices(0, last)
    row["resumed_at_end_cpu_s"] = time.process_time() - began
    row["rank_mib"] = (psutil.Process().memory_info().rss - before) / (1 << 20)
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / (1 << 20)
    return row


def boxes(count: int) -> dict[str, Any]:
    """Open synthetic annotations as a rank does, and read every sample once in a forked process as a loader does."""
    from benchmarks.growth import coco_made
    from mtrain.core.interfaces import SplitRequest
    from mtrain.spec.bounds import give_back
    from mtrain.tasks.detection.readers.coco import Coco

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"from benchmarks.growth import coco_made as m; m.write(m.Path({folder!r}), boxes={count})",
            ],
            check=True,
            cwd=ROOT,
        )
        before, began = psutil.Process().memory_info().rss, time.process_time()
        annotations = Coco().read(SplitRequest(root=Path(folder), split="train"))
        give_back()
        row: dict[str, Any] = {"boxes": count, "images": len(annotations), "open_cpu_s": time.process_time() - began}
    row["rank_mib"] = (psutil.Process().memory_info().rss - before) / (1 << 20)
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / (1 << 20)
    row["worker_own_mib"] = forked.own_mib(lambda: _use(annotations))
    assert len(annotations.class_names) == coco_made.CLASSES
    return row


def shared(count: int, ranks: int) -> dict[str, Any]:
    """Open the annotations on several ranks of one host, first each by itself, then as a job does: what they take together."""
    row: dict[str, Any] = {"boxes": count, "ranks": ranks}
    with tempfile.TemporaryDirectory() as folder:
        made = f"from benchmarks.growth import coco_made as m; m.write(m.Path({folder!r}), boxes={count})"
        subprocess.run([sys.executable, "-c", made], check=True, cwd=ROOT)
        for name, told in (("alone", 1), ("shared", ranks)):
            env = {**os.environ, "LOCAL_WORLD_SIZE": str(told), "TMPDIR": folder}
            argv = [sys.executable, "-m", "benchmarks.growth.samples", "open", folder]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started = [subprocess.Popen(argv, cwd=ROOT, env=env, **pipes) for _ in range(ranks)]
            opened = [json.loads(process.stdout.readline()) for process in started if process.stdout]
            # Each page counts once for the host: by its share of those who have it.
            row[f"{name}_mib"] = sum(psutil.Process(process.pid).memory_full_info().pss for process in started) / (
                1 << 20
            )
            row[f"{name}_cpu_s"] = sum(each["cpu_s"] for each in opened)
            for process in started:
                process.communicate("")
    return row


def open_and_wait(folder: str) -> None:
    """Open the annotations, use every sample once, say what that took, and wait until the input ends."""
    from mtrain.core.interfaces import SplitRequest
    from mtrain.spec.bounds import give_back
    from mtrain.tasks.detection.readers.coco import Coco

    began = time.process_time()
    annotations = Coco().read(SplitRequest(root=Path(folder), split="train"))
    used = time.process_time() - began
    for sample in annotations.samples:
        _ = sample.targets
    give_back()
    print(json.dumps({"cpu_s": used}), flush=True)
    sys.stdin.read()


def _use(annotations: Any) -> None:
    """Use path and targets of every sample once."""
    for sample in annotations.samples:
        _ = sample.path, sample.targets


def main() -> None:
    """Measure one row: ``python -m benchmarks.growth.samples order|boxes NUMBER`` or ``shared BOXES RANKS``."""
    kind, numbers = sys.argv[1], sys.argv[2:]
    if kind == "open":
        open_and_wait(numbers[0])
        return
    print(json.dumps({"order": order, "boxes": boxes, "shared": shared}[kind](*map(int, numbers))))


if __name__ == "__main__":
    main()
