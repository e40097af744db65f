"""Pictures without annotations, for a detector to find objects in; and what it found, written down."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.core.interfaces import Task
from mtrain.data.images.drawing import save_picture
from mtrain.data.images.header import probe
from mtrain.data.reading import listed, unique_stems
from mtrain.errors import DataError
from mtrain.report.reporter import write_json
from mtrain.tasks.description import describe_task
from mtrain.tasks.detection.annotations import Annotations, Picture, assemble
from mtrain.tasks.detection.drawing import draw_boxes
from mtrain.tasks.detection.evaluator import CocoEvaluator, Detections, results_json
from mtrain.tasks.detection.picture_cache import decode_annotated
from mtrain.tasks.detection.source import open_sources

if TYPE_CHECKING:
    from mtrain.data.loader.pool import PooledSource
    from mtrain.spec.model import Spec


class DetectionPictures:
    """``PictureData`` of ``core.interfaces`` for detection."""

    def __init__(self, spec: "Spec", pictures: Annotations) -> None:
        self._spec = spec
        self._pictures = pictures

    def task(self) -> Task:
        """What a model must know before it is built."""
        return describe_task("detection", self._spec, self._pictures.class_names)

    def sources(self) -> "Mapping[str, PooledSource]":
        """``val``: the pictures."""
        opened = open_sources(self._spec.data, None, self._pictures, seed=0)
        return {str(name): source for name, source in opened.items()}

    def length(self, split: str) -> int:
        """Pictures."""
        return len(self._pictures)

    def statistics(self) -> Mapping[str, Any]:
        """Nothing is known of boxes."""
        return {}

    def evaluator(self) -> CocoEvaluator:
        """Collects predictions; there is nothing to score them by."""
        return CocoEvaluator(self._pictures)

    def write(
        self,
        partial: Mapping[int, Detections],
        out: Path,
        *,
        confidence: float,
        draw: bool,
        names: Mapping[Path, str] | None = None,
    ) -> None:
        """``predictions.json`` in the COCO results form, each row with its ``file_name`` and ``class``; pictures with boxes."""
        kept = {index: rows[rows[:, 4] >= confidence] for index, rows in sorted(partial.items())}
        out.mkdir(parents=True, exist_ok=True)
        called = names or {}
        files = {sample.image_id: called.get(sample.path, str(sample.path)) for sample in self._pictures.samples}
        classes = dict(zip(self._pictures.category_ids, self._pictures.class_names, strict=True))
        rows = [
            {"file_name": files[row["image_id"]], "class": classes[row["category_id"]], **row}
            for row in results_json(self._pictures, kept)
        ]
        write_json(out / "predictions.json", rows)
        if draw:
            self._draw(kept, out)

    def _draw(self, found: Mapping[int, Detections], out: Path) -> None:
        samples, class_names = self._pictures.samples, self._pictures.class_names
        stems = unique_stems([sample.path for sample in samples])
        for index, boxes in found.items():
            labels = boxes[:, 5].astype(int)
            drawn = draw_boxes(decode_annotated(samples[index]), boxes[:, :4], labels, class_names, scores=boxes[:, 4])
            save_picture(drawn, out / f"{stems[index]}.jpg")


def unannotated(files: Sequence[Path], *, class_names: Sequence[str], category_ids: Sequence[int]) -> Annotations:
    """Pictures without boxes, in the order of their names; ``image_id`` is their place in it, from 1.

    Raises:
        DataError: some cannot be read; all of them are named.
    """
    pictures, problems = [], []
    for number, file in enumerate(sorted(files), start=1):
        try:
            width, height = probe(file)
        except DataError as error:
            problems.append(str(error))
            continue
        pictures.append(
            Picture(
                path=file,
                file_name=str(file),
                image_id=number,
                width=width,
                height=height,
                boxes_xywh=np.zeros((0, 4)),
                labels=np.zeros(0, np.int64),
                crowd=np.zeros(0, np.bool_),
                area=np.zeros(0),
            )
        )
    if problems:
        raise DataError(f"{len(problems)} of {len(files)} pictures cannot be read:\n{listed(problems)}")
    return assemble(pictures, class_names=class_names, category_ids=category_ids)
