"""Predictions that are in memory or in a file in COCO's results form, for tests of the metrics."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    truth, entries = (json.loads(file.read_text(encoding="utf-8")) for file in (annotations, results))
    return score(truth, Listed(entries=entries), iou_type=iou_type)[0]
