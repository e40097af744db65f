"""Predictions that are in memory or in a file in COCO's results form, for tests of the metrics."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.tasks.detection.scoring import Boxes, Entry, score


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """Implements ``Found`` for predictions that are in memory, such as those of a file."""

    entries: Sequence[Entry]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def of(self, category_ids: Collection[Any], numbers: Mapping[Any, int]) -> Boxes:
        own = [entry for entry in self.entries if entry["category_id"] in category_ids]
        images = np.array([numbers[entry["image_id"]] for entry in own], np.int64)
        classes = np.array([entry["category_id"] for entry in own], np.int64)
        boxes = np.array([entry["bbox"] for entry in own], np.float64).reshape(-1, 4)
        scores = np.array([entry["score"] for entry in own], np.float64)
        return Boxes(images, classes, boxes, boxes[:, 2] * boxes[:, 3], scores, np.zeros(len(own), np.bool_))


def evaluate_files(annotations: Path, results: Path) -> dict[str, float]:
    """Compute the metrics of a COCO results file against a COCO annotation file, both used unchanged."""
    truth, entries = (json.loads(file.read_text(encoding="utf-8")) for file in (annotations, results))
    return score(truth, Listed(entries=entries))[0]
