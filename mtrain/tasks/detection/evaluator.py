"""Compute COCO average precision with faster-coco-eval, over all ranks, counting every image once.

The metrics are those of the COCO evaluation (https://cocodataset.org/#detection-eval): areas come from the annotation,
crowds match any number of predictions and count neither as hit nor as miss. A metric without anything to measure is
-1, as in pycocotools.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import HostBatch
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.scoring import COCO_DETECTIONS, METRICS, Boxes, Scored, score

Detections: TypeAlias = NDArray[np.float64]
"""Detections of one image, (K, 6): x1, y1, x2, y2 in pixels of the image as displayed, score, class index."""

NO_BOXES = "no boxes in the evaluation split: there is nothing to score"


class CocoEvaluator:
    """Implements :class:`mtrain.core.interfaces.Evaluator` for detection."""

    metrics: ClassVar[Sequence[str]] = (*METRICS, "score")
    headline: ClassVar[Sequence[str]] = ("AP", "AP50", "AP75", "AR100")
    scores_once: ClassVar[bool] = True
    """Scoring 50,000 images takes half a gigabyte and half a minute, which the other ranks of a host would take as well."""

    def __init__(
        self,
        annotations: Annotations,
        *,
        max_detections: int = COCO_DETECTIONS,
    ) -> None:
        """Start without predictions.

        Args:
            annotations: The evaluation split.
            max_detections: Number of predictions per image that average precision counts, best scores first.
        """
        self._annotations = annotations
        self._max_detections = max_detections
        self._predicted = 0
        self._predictions: dict[int, Detections] = {}
        self._metrics: dict[str, float] = {}
        self.last: Scored | None = None
        """The last result, if anything was predicted; for pages."""

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Add the predictions of one micro batch. An image that was already added is skipped.

        ``batch["index"]`` int64 (B,): position in ``annotations.samples``. ``batch["scale_pad"]`` float32 (B, 4):
        ratio_w, ratio_h, pad_w, pad_h of the letterbox. ``predictions``: B arrays (K, 6) of x1, y1, x2, y2 in pixels
        of the network input, score, class index.
        """
        for index, scale_pad, boxes in zip(batch["index"], batch["scale_pad"], predictions, strict=True):
            # The last micro batches are filled up with the first samples
            # (``core.samples.sampler.Padded``), which count once.
            if int(index) not in self._predictions:
                sample = self._annotations.samples[int(index)]
                self._predictions[int(index)] = to_image(boxes, scale_pad, width=sample.width, height=sample.height)

    def partial(self) -> dict[int, Detections]:
        """Return the predictions of this rank by sample index, in pixels of the images."""
        return self._predictions

    def result(self, partials: Sequence[Mapping[int, Detections]]) -> dict[str, float]:
        """Return all of :data:`METRICS`, AP and AP50 of each class that occurs, and ``score``, which is AP.

        Those of a class are ``AP/<class>`` and ``AP50/<class>``. Empty where the split has no boxes: there is nothing to score.
        """
        if not box_counts(self._annotations).any():
            return {}
        predictions = merge(partials)
        self._predicted = sum(map(len, predictions.values()))
        # COCO's metrics count no others, and the evaluation spends
        # most of its time on them where a model predicts much.
        counted = max(self._max_detections, COCO_DETECTIONS)
        best = {index: best_of_classes(detections, counted) for index, detections in predictions.items()}
        found = FoundBoxes(self._annotations, best)
        truth = dict(self._annotations.ground_truth)
        self._metrics, self.last = score(truth, found, max_detections=self._max_detections)
        return {"score": self._metrics["AP"], **self._metrics}

    def remarks(self) -> list[str]:
        """Report AP by object size, and possible reasons if nothing was predicted."""
        sizes = {"small": "APs", "medium": "APm", "large": "APl"}
        if not self._metrics:
            return [] if box_counts(self._annotations).any() else [NO_BOXES]
        parts = [f"{size} {self._metrics[name]:.4g}" for size, name in sizes.items() if self._metrics[name] >= 0]
        absent = [f"no {size} objects" for size, name in sizes.items() if self._metrics[name] < 0]
        lines = ["AP by size: " + "  ".join(parts + absent)]
        if not self._predicted:
            lines.append(
                "no box was predicted in any image: early in training that is usual; later, look at the learning rate, the "
                "labels "
                "(`mtrain data check`) and where model.weights comes from"
            )
        return lines


def box_counts(annotations: Annotations) -> NDArray[np.int64]:
    """Return (N,) the number of boxes to find in each image; crowds do not count."""
    return np.array([int((~sample.crowd).sum()) for sample in annotations.samples], dtype=np.int64)


def warn_of_crowds(annotations: Annotations, max_detections: int) -> str | None:
    """Return a warning if some images have more boxes than ``max_detections`` predictions can find, else None."""
    counts = box_counts(annotations)
    excess_count = int((counts > max_detections).sum())
    if not excess_count:
        return None
    return (
        f"{excess_count} images have more than {max_detections} boxes (up to {counts.max()}), but AP counts the best "
        f"{max_detections} predictions of an image, so it cannot reach 1; raise evaluate.max_detections to "
        f"{counts.max()}"
    )


def merge(partials: Sequence[Mapping[int, Detections]]) -> dict[int, Detections]:
    """Merge the predictions of all ranks by sample index, each image once, in order of the index."""
    union: dict[int, Detections] = {}
    for partial in partials:
        for index, detections in partial.items():
            union.setdefault(index, detections)
    return dict(sorted(union.items()))


def best_of_classes(detections: Detections, count: int) -> Detections:
    """Return the ``count`` predictions of each class with the best scores, in their order; of equal scores the first ones."""
    if len(detections) <= count or np.bincount(detections[:, 5].astype(np.int64)).max() <= count:
        return detections
    by_class = np.lexsort((-detections[:, 4], detections[:, 5]))  # of equal class and score, the first one comes first
    starts = np.searchsorted(detections[by_class, 5], detections[by_class, 5])
    best: Detections = detections[np.sort(by_class[np.arange(len(by_class)) - starts < count])]
    return best


def to_image(detections: Any, scale_pad: Any, *, width: int, height: int) -> Detections:
    """Map boxes of the letterboxed input to the image and clip them to it: x_image = (x - pad) / ratio."""
    boxes = np.array(detections, dtype=np.float64).reshape(-1, 6)
    ratio, pad = np.tile(np.asarray(scale_pad[:2], np.float64), 2), np.tile(np.asarray(scale_pad[2:], np.float64), 2)
    limit = np.array([width, height, width, height], dtype=np.float64)
    boxes[:, :4] = np.clip((boxes[:, :4] - pad) / ratio, 0.0, limit)
    return boxes


def results_json(annotations: Annotations, predictions: Mapping[int, Detections]) -> list[dict[str, Any]]:
    """Return predictions in the COCO results form, with the annotation file's own ids."""
    return list(FoundBoxes(annotations, predictions))


class FoundBoxes:
    """Implements ``Found`` for the predictions of ``merge``, with the annotation file's own ids."""

    def __init__(self, annotations: Annotations, predictions: Mapping[int, Detections]) -> None:
        """Keep the predictions, which must not change."""
        self._category_ids = annotations.category_ids
        self._image_ids = [annotations.samples[index].image_id for index in predictions]
        self._counts = [len(detections) for detections in predictions.values()]
        # Each prediction is made anew when it is read: in COCO's form one takes ten times the memory that it takes in an array.
        self._rows = np.concatenate([np.zeros((0, 6)), *predictions.values()])
        self._labels = self._rows[:, 5].astype(np.int64)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """See ``Found``."""
        image_ids = itertools.chain.from_iterable(map(itertools.repeat, self._image_ids, self._counts))
        for image_id, (x1, y1, x2, y2, confidence, label) in zip(
            image_ids, map(np.ndarray.tolist, self._rows), strict=True
        ):
            box = [x1, y1, x2 - x1, y2 - y1]
            yield {
                "image_id": image_id,
                "category_id": self._category_ids[int(label)],
                "bbox": box,
                "score": confidence,
            }

    def of(self, category_ids: Collection[Any], numbers: Mapping[Any, int]) -> Boxes:
        """See ``Found``."""
        labels = [label for label, category in enumerate(self._category_ids) if category in category_ids]
        places = np.flatnonzero(np.isin(self._labels, labels))
        images = np.repeat(np.array([numbers[i] for i in self._image_ids], np.int64), self._counts)[places]
        rows = self._rows[places]
        sizes = rows[:, 2:4] - rows[:, :2]
        classes = np.array(self._category_ids, np.int64)[self._labels[places]]
        boxes = np.concatenate((rows[:, :2], sizes), axis=1)
        return Boxes(images, classes, boxes, sizes.prod(axis=1), rows[:, 4], np.zeros(len(rows), np.bool_))
