"""Predictions that are in memory or in a file in COCO's results form, for tests of the metrics."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.tasks.detection.readers.coco_json import load_json
from mtrain.tasks.detection.scoring import Entry, IouType, score


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """Implements ``Found`` for predictions that are in memory, such as those of a file."""

    entries: Sequence[Entry]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def of(self, category_ids: Collection[Any]) -> Iterable[Entry]:
        return [entry for entry in self.entries if entry["category_id"] in category_ids]


def evaluate_files(annotations: Path, results: Path, *, iou_type: IouType = "bbox") -> dict[str, float]:
    """Compute the metrics of a COCO results file against a COCO annotation file, both used unchanged."""
    return score(load_json(annotations), Listed(entries=json.loads(results.read_text())), iou_type=iou_type)[0]
