"""Segment images without labels, and write the predictions to files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mtrain.core.interfaces import HostBatch
from mtrain.core.record_files import write_json
from mtrain.data.images.drawing import save_image
from mtrain.data.images.indexed import write_indices
from mtrain.data.images.readable import need_readable
from mtrain.data.reading import unique_stems
from mtrain.tasks.image_task import PredictionImages
from mtrain.tasks.segmentation.drawing import overlay
from mtrain.tasks.segmentation.evaluator import compress, expand
from mtrain.tasks.segmentation.fitting import back
from mtrain.tasks.segmentation.masks import MaskedImages
from mtrain.tasks.segmentation.section import data_of
from mtrain.tasks.segmentation.source import SegmentationSource

if TYPE_CHECKING:
    from mtrain.data.loader.source_ring import PooledSource


class MaskCollector:
    """Implements ``core.interfaces.Evaluator`` for images without labels: it keeps the predictions."""

    metrics: ClassVar[Sequence[str]] = ()
    headline: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, bytes]] = {}

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Keep the predictions of one micro batch."""
        for index, prediction in zip(batch["index"], predictions, strict=True):
            self._kept.setdefault(int(index), {name: compress(prediction[name]) for name in ("classes", "certainty")})

    def partial(self) -> dict[int, dict[str, bytes]]:
        """Return the compressed maps ``classes`` and ``certainty`` by sample index."""
        return self._kept

    def result(self, partials: Sequence[Any]) -> dict[str, float]:
        """Return no metrics: there is no truth."""
        return {}

    def remarks(self) -> list[str]:
        """Return nothing."""
        return []


class SegmentationImages(PredictionImages):
    """Images to predict on. Implements ``ImageData`` of ``core.interfaces`` for segmentation."""

    kind = "segmentation"
    _images: MaskedImages

    def sources(self) -> "Mapping[str, PooledSource]":
        """Return the images as the source ``val``."""
        data = data_of(self._spec)
        return {"val": SegmentationSource(self._images, side=data.image_size, resize=data.resize)}

    def evaluator(self) -> MaskCollector:
        """Create an evaluator that only collects predictions; there is no ground truth."""
        return MaskCollector()

    def write(
        self,
        partial: Mapping[int, Mapping[str, bytes]],
        out: Path,
        *,
        confidence: float,
        draw: bool,
        names: Mapping[Path, str] | None = None,
    ) -> None:
        """Write for each image a PNG of its class indices, of its size and with the palette of Pascal VOC.

        ``predictions.json`` has an entry for each class of an image whose pixels have a mean probability of at least
        ``confidence``: ``file_name``, ``class``, ``label``, ``score`` (that mean), ``share`` (of the image's pixels) and
        ``mask`` (the PNG). With ``draw`` each image is written too, with its classes in colour.
        """
        out.mkdir(parents=True, exist_ok=True)
        files, data = self._images.images, data_of(self._spec)
        stems = unique_stems(files)
        rows: list[dict[str, Any]] = []
        for index, maps in sorted(partial.items()):
            image = self._images.image(index)
            size_wh, side = (image.shape[1], image.shape[0]), data.image_size
            classes, certainty = (
                back(np.asarray(expand(maps[name], (side, side))), size_wh, resize=data.resize)
                for name in ("classes", "certainty")
            )
            write_indices(classes, out / f"{stems[index]}.png")
            for label in np.unique(classes).tolist():
                of_class = classes == label
                score = float(certainty[of_class].mean() / 255)
                if score >= confidence:
                    rows.append(
                        {
                            "file_name": (names or {}).get(files[index], str(files[index])),
                            "class": self._images.class_names[label],
                            "label": label,
                            "score": score,
                            "share": float(of_class.mean()),
                            "mask": f"{stems[index]}.png",
                        }
                    )
            if draw:
                save_image(overlay(image, classes), out / f"{stems[index]}.jpg")
        write_json(out / "predictions.json", rows)


def without_labels(files: Sequence[Path], *, class_names: Sequence[str], max_pixels: int) -> MaskedImages:
    """Images in the order of their names, which are decoded when they are needed.

    Raises:
        DataError: some cannot be read; all of them are named.
    """
    files = sorted(files)
    need_readable(files, max_pixels=max_pixels)
    return MaskedImages(images=files, masks=(), class_names=tuple(class_names), max_pixels=max_pixels)
