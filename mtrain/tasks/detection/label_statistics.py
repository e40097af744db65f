"""Statistics of a split: those that a model needs before it is built, and those shown to people."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mtrain.tasks.detection.annotations import Annotations

SMALL_PX2 = 32**2
MEDIUM_PX2 = 96**2
"""Areas up to which COCO calls an object small or medium, in square pixels."""


def statistics(annotations: Annotations, *, image_size: int, stretch: bool = False) -> Mapping[str, Any]:
    """Return the statistics for ``Model.prepare_task``.

    ``boxes_wh_px`` float64 (N, 2): sizes of all training boxes in pixels of the network input, the longer side (with
    ``stretch`` each side) of each image scaled to ``image_size``. ``class_count``: number of classes. ``images``:
    number of images.
    """
    sizes = [
        # Letterboxing keeps an image's shape, so one factor holds for both axes; stretching has a factor for each.
        (targets[:, 2:] - targets[:, :2]).astype(np.float64) * (image_size / (size if stretch else size.max()))
        for sample in annotations.samples
        for targets, size in [(sample.targets[0], np.array([sample.width, sample.height]))]
    ]
    return {
        "boxes_wh_px": np.concatenate(sizes) if sizes else np.zeros((0, 2)),
        "class_count": len(annotations.class_names),
        "images": len(annotations.samples),
    }


def class_histogram(annotations: Annotations) -> dict[str, int]:
    """Count the boxes fit for training per class, in label order; classes without boxes are included."""
    labels = [sample.targets[1] for sample in annotations.samples]
    joined = np.concatenate([*labels, np.zeros(0, dtype=np.int64)])
    counts = np.bincount(joined, minlength=len(annotations.class_names))
    return {name: int(count) for name, count in zip(annotations.class_names, counts, strict=True)}


def size_histogram(annotations: Annotations) -> dict[str, int]:
    """Count the boxes fit for training by COCO's sizes: small (annotated area < 32^2), medium, large (> 96^2)."""
    areas = [sample.area[~sample.crowd] for sample in annotations.samples]
    area = np.concatenate(areas) if areas else np.zeros(0)
    small, large = int((area < SMALL_PX2).sum()), int((area > MEDIUM_PX2).sum())
    return {"small": small, "medium": len(area) - small - large, "large": large}


def image_sizes(annotations: Annotations) -> dict[tuple[int, int], int]:
    """Count the images of each (width, height), most frequent first."""
    counts: dict[tuple[int, int], int] = {}
    for sample in annotations.samples:
        counts[sample.width, sample.height] = counts.get((sample.width, sample.height), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
