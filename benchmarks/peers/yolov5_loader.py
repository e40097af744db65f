"""The loader of the original YOLOv5, from a checkout that is named: its own code, settings and worker process.

Nothing of it is part of mtrain. The interpreter needs what the original imports.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mtrain.tasks.detection.annotations import Sample


def written(samples: Sequence[Sample], folder: Path) -> Path:
    """Write a data set in YOLO's form, with links to the images; return the folder of the images."""
    images, labels = folder / "images" / "train", folder / "labels" / "train"
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    for sample in samples:
        (images / sample.path.name).symlink_to(sample.path.resolve())
        boxes, classes = sample.targets
        size = np.array([sample.width, sample.height])
        centres, sides = (boxes[:, :2] + boxes[:, 2:]) / 2 / size, (boxes[:, 2:] - boxes[:, :2]) / size
        rows = np.concatenate([classes[:, None], centres, sides], axis=1)
        np.savetxt(labels / f"{sample.path.stem}.txt", rows, fmt=["%d", *["%.6f"] * 4])
    return images


def original_loader(checkout: Path, images: Path, side: int, *, batch: int) -> Any:
    """Return the original's endless loader with the settings of its training from scratch, and one worker."""
    sys.path.insert(0, str(checkout))
    from utils.dataloaders import create_dataloader

    settings = yaml.safe_load((checkout / "data" / "hyps" / "hyp.scratch-low.yaml").read_text())
    options = {"hyp": settings, "augment": True, "workers": 1, "shuffle": True}
    return create_dataloader(str(images), side, batch, 32, **options)[0]


class Passes:
    """Passes of ``count`` batches over the endless loader."""

    def __init__(self, loader: Any, count: int) -> None:
        self._batches = self._endless(loader)
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, self._count)

    @staticmethod
    def _endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader
