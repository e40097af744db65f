"""Classify images without labels, and write the predictions to files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mtrain.core.record_files import write_json
from mtrain.data.images.drawing import grid, save_image
from mtrain.data.images.readable import need_readable
from mtrain.data.reading import unique_stems
from mtrain.tasks.classification.drawing import caption_of
from mtrain.tasks.classification.evaluator import ClassEvaluator
from mtrain.tasks.classification.images import EncodedImages
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.section import data_of
from mtrain.tasks.classification.source import ClassificationSource
from mtrain.tasks.image_task import PredictionImages

if TYPE_CHECKING:
    from mtrain.data.loader.source_ring import PooledSource
    from mtrain.tasks.classification.section import ClassificationDataSpec


class ClassImages(PredictionImages):
    """Images to predict on. Implements ``ImageData`` of ``core.interfaces`` for classification."""

    kind = "classification"
    _images: LabelledImages

    def sources(self) -> "Mapping[str, PooledSource]":
        """Return the images as the source ``val``."""
        data = data_of(self._spec)
        fit: Any = {"side": data.image_size, "resize": data.resize, "crop_share": data.crop_share}
        return {"val": ClassificationSource(self._images, **fit)}

    def evaluator(self) -> ClassEvaluator:
        """Create an evaluator that only collects predictions; there is no ground truth."""
        return ClassEvaluator(self._images)

    def write(
        self,
        partial: Mapping[int, NDArray[np.float32]],
        out: Path,
        *,
        confidence: float,
        draw: bool,
        names: Mapping[Path, str] | None = None,
    ) -> None:
        """Write ``predictions.json``: ``file_name``, ``class``, ``label`` (its number, from 0) and ``score`` (its
        probability) of each image whose most probable class reaches ``confidence``; with ``draw`` also the
        images with their class above."""
        out.mkdir(parents=True, exist_ok=True)
        files, classes = self._images.origins, self._images.class_names
        display_names = names or {}
        stems = unique_stems([Path(file) for file in files])
        rows = []
        for index, probabilities_C in sorted(partial.items()):
            label = int(probabilities_C.argmax())
            score = float(probabilities_C[label])
            is_confident = score >= confidence
            if is_confident:
                name = display_names.get(Path(files[index]), files[index])
                rows.append({"file_name": name, "class": classes[label], "label": label, "score": score})
            if draw:
                best = (classes[label], score) if is_confident else None
                caption = caption_of(best, confidence=confidence)
                drawn = grid([self._images.images[index]], columns=1, captions=[caption])
                save_image(drawn, out / f"{stems[index]}.jpg")
        write_json(out / "predictions.json", rows)


def without_labels(
    files: Sequence[Path], data: "ClassificationDataSpec", *, class_names: Sequence[str]
) -> LabelledImages:
    """Images in the order of their names, which are decoded when they are needed; their labels mean nothing.

    Raises:
        DataError: some cannot be read; all of them are named.
    """
    files = sorted(files)
    need_readable(files, max_pixels=data.max_pixels)
    origins = [str(file) for file in files]
    return LabelledImages(
        images=EncodedImages(origins, max_pixels=data.max_pixels),
        labels=np.zeros(len(files), dtype=np.int64),
        class_names=tuple(class_names),
        origins=origins,
    )
