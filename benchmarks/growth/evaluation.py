"""How the memory of an evaluation grows with its images: the predictions of two ranks are merged and scored on one of them.

The annotations and predictions are synthetic, 7 boxes and 20 predictions for each image; no network is behind them.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

IMAGE_SIZES = (500, 5_000, 50_000)
BOXES, PREDICTIONS, CLASSES, RANKS = 7, 20, 80, 2


def annotations_of(count: int) -> Any:
    """Return annotations of so many images of 640 x 480."""
    from mtrain.tasks.detection.annotations import AnnotatedImage, assemble

    generator = np.random.default_rng(1)
    images = []
    for number in range(count):
        corner, size = generator.uniform(0, [500, 400], (BOXES, 2)), generator.uniform(4, [140, 80], (BOXES, 2))
        images.append(
            AnnotatedImage(
                path=Path("/images") / f"{number:06d}.jpg",
                file_name=f"{number:06d}.jpg",
                image_id=number,
                width=640,
                height=480,
                boxes_xywh=np.concatenate([corner, size], axis=1),
                labels=generator.integers(0, CLASSES, BOXES),
                crowd=np.zeros(BOXES, dtype=np.bool_),
                area=size.prod(axis=1),
            )
        )
    classes = [f"class {number}" for number in range(CLASSES)]
    return assemble(images, class_names=classes, category_ids=range(1, CLASSES + 1))


def predictions_of(annotations: Any, rank: int) -> dict[int, Any]:
    """Return the predictions of one of two ranks: of each image the boxes, moved a little, and some wrong ones."""
    generator = np.random.default_rng(rank)
    found = {}
    for index in range(rank, len(annotations), RANKS):
        sample = annotations.samples[index]
        boxes = sample.boxes[generator.integers(0, len(sample.boxes), PREDICTIONS)] + generator.normal(
            0, 3, (PREDICTIONS, 4)
        )
        labels = sample.labels[generator.integers(0, len(sample.labels), PREDICTIONS)]
        found[index] = np.column_stack([boxes, generator.uniform(0, 1, PREDICTIONS), labels]).astype(np.float64)
    return found


def evaluation(count: int) -> dict[str, Any]:
    """Measure merging and scoring the predictions of ``count`` images."""
    from mtrain.core.ranks.serialization import pack, unpack
    from mtrain.tasks.detection.evaluator import CocoEvaluator

    annotations = annotations_of(count)
    own, other = (predictions_of(annotations, rank) for rank in range(RANKS))
    before = psutil.Process().memory_info().rss
    sent = pack(own)
    row: dict[str, Any] = {"images": count, "sent_mb": len(sent) / 1e6}
    partials = [unpack(sent), other]
    del sent
    began = time.process_time()
    metrics = CocoEvaluator(annotations).result(partials)
    row["score_cpu_s"] = time.process_time() - began
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / (1 << 20)
    assert 0 < metrics["AP50"] < 1
    return row


def main() -> None:
    """Measure one row: ``python -m benchmarks.growth.evaluation evaluation IMAGES``."""
    print(json.dumps(evaluation(int(sys.argv[2]))))


if __name__ == "__main__":
    main()
