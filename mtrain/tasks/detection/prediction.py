"""Predict boxes on images without annotations, and write them to files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mtrain.core.record_files import write_json
from mtrain.data.images.drawing import save_image
from mtrain.data.images.header import probe
from mtrain.data.reading import listed, unique_stems
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.drawing import draw_boxes
from mtrain.tasks.detection.evaluator import CocoEvaluator, Detections, results_json
from mtrain.tasks.detection.image_cache import decode_annotated
from mtrain.tasks.detection.section import data_of
from mtrain.tasks.detection.source import open_sources
from mtrain.tasks.image_task import PredictionImages

if TYPE_CHECKING:
    from mtrain.data.loader.source_ring import PooledSource


class DetectionImages(PredictionImages):
    """Images to predict on. Implements ``ImageData`` of ``core.interfaces`` for detection."""

    kind = "detection"
    _images: Annotations

    def sources(self) -> "Mapping[str, PooledSource]":
        """Return the images as the source ``val``."""
        opened = open_sources(data_of(self._spec), None, self._images, seed=0)
        return {str(name): source for name, source in opened.items()}

    def evaluator(self) -> CocoEvaluator:
        """Create an evaluator that only collects predictions; there is no ground truth."""
        return CocoEvaluator(self._images)

    def write(
        self,
        partial: Mapping[int, Detections],
        out: Path,
        *,
        confidence: float,
        draw: bool,
        names: Mapping[Path, str] | None = None,
    ) -> None:
        """Write ``predictions.json`` in the COCO results form, each row with its ``file_name`` and ``class``; with
        ``draw`` also the images with their boxes."""
        confident = {index: rows[rows[:, 4] >= confidence] for index, rows in sorted(partial.items())}
        out.mkdir(parents=True, exist_ok=True)
        display_names = names or {}
        files = {sample.image_id: display_names.get(sample.path, str(sample.path)) for sample in self._images.samples}
        classes = dict(zip(self._images.category_ids, self._images.class_names, strict=True))
        rows = [
            {"file_name": files[row["image_id"]], "class": classes[row["category_id"]], **row}
            for row in results_json(self._images, confident)
        ]
        write_json(out / "predictions.json", rows)
        if draw:
            self._draw(confident, out)

    def _draw(self, predictions: Mapping[int, Detections], out: Path) -> None:
        samples, class_names = self._images.samples, self._images.class_names
        stems = unique_stems([sample.path for sample in samples])
        for index, boxes in predictions.items():
            labels = boxes[:, 5].astype(int)
            drawn = draw_boxes(decode_annotated(samples[index]), boxes[:, :4], labels, class_names, scores=boxes[:, 4])
            save_image(drawn, out / f"{stems[index]}.jpg")


def without_boxes(files: Sequence[Path], *, class_names: Sequence[str], category_ids: Sequence[int]) -> Annotations:
    """Return images without boxes, in the order of their names; ``image_id`` is their position in it, from 1.

    Raises:
        DataError: some cannot be read; they are listed.
    """
    images, problems = [], []
    # Only the header is read: the size is needed before the first image is decoded.
    for number, file in enumerate(sorted(files), start=1):
        try:
            size_wh = probe(file)
        except DataError as error:
            problems.append(str(error))
            continue
        image = AnnotatedImage.of(file, number, np.zeros((0, 4)), [], size_wh=size_wh)
        images.append(replace(image, file_name=str(file)))
    if problems:
        raise DataError(f"{len(problems)} of {len(files)} images cannot be read:\n{listed(problems)}")
    return assemble(images, class_names=class_names, category_ids=category_ids)
