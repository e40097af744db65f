"""Compute COCO average precision with faster-coco-eval, over all ranks, counting every image once.

The metrics are those of the COCO evaluation (https://cocodataset.org/#detection-eval): areas come from the annotation,
crowds match any number of predictions and count neither as hit nor as miss. A metric without anything to measure is
-1, as in pycocotools.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import HostBatch
from mtrain.errors import DataError
from mtrain.spec.files import parse_json, read_bytes
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.readers.coco_json import MAX_BYTES, load_json

Detections: TypeAlias = NDArray[np.float64]
"""Detections of one image, (K, 6): x1, y1, x2, y2 in pixels of the image as displayed, score, class index."""
IouType: TypeAlias = Literal["bbox", "segm"]

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""Average precision: over IoU 0.50:0.95, at 0.50, at 0.75, then for small (area < 32^2), medium, large (> 96^2)
objects; average recall with 1, 10, 100 predictions an image, then by size."""


COCO_DETECTIONS = 100
"""Number of predictions per image that COCO's metrics count, best scores first."""
NO_BOXES = "no boxes in the evaluation split: there is nothing to score"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A result of COCO's evaluation, and what it was computed from."""

    dataset: Mapping[str, Any]
    """Images, objects and classes in COCO's form, with numbers from 1 as ids of images and objects."""
    results: Sequence[Mapping[str, Any]]
    """Predictions in COCO's results form."""
    precision: NDArray[np.float64]
    """(IoU threshold 0.50:0.95, recall 0:1 in 101 steps, class in the order of ``dataset``), all sizes; -1: the class does not occur."""


class CocoEvaluator:
    """Implements :class:`mtrain.core.interfaces.Evaluator` for detection."""

    metrics: ClassVar[Sequence[str]] = (*METRICS, "score")
    headline: ClassVar[Sequence[str]] = ("AP", "AP50", "AP75", "AR100")
    scores_once: ClassVar[bool] = True
    """Scoring 50,000 images takes gigabytes, which the other ranks of a host would take as well."""

    def __init__(
        self,
        annotations: Annotations,
        *,
        max_detections: int = COCO_DETECTIONS,
        only: Collection[int] | None = None,
    ) -> None:
        """Start without predictions.

        Args:
            annotations: The evaluation split.
            max_detections: Number of predictions per image that average precision counts, best scores first.
            only: Indices of the samples that are scored; None: all.
        """
        self._only = only
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
            if int(index) not in self._predictions:
                sample = self._annotations.samples[int(index)]
                self._predictions[int(index)] = to_image(boxes, scale_pad, width=sample.width, height=sample.height)

    def partial(self) -> dict[int, Detections]:
        """Return the predictions of this rank by sample index, in pixels of the images."""
        return self._predictions

    def result(self, partials: Sequence[Mapping[int, Detections]]) -> dict[str, float]:
        """Return all of :data:`METRICS`, ``AP/<class>`` and ``AP50/<class>`` of classes that occur, and ``score`` (=
        AP).

        Empty where the split has no boxes: there is nothing to score.
        """
        counts = box_counts(self._annotations)
        if not (counts if self._only is None else counts[list(self._only)]).any():
            return {}
        predictions = merge(partials)
        self._predicted = sum(map(len, predictions.values()))
        counted = max(self._max_detections, COCO_DETECTIONS)
        best = {index: best_of_classes(detections, counted) for index, detections in predictions.items()}
        results = iterate_results(self._annotations, best)
        truth = dict(self._annotations.ground_truth)
        if self._only is not None:
            known = {self._annotations.samples[index].image_id for index in self._only}
            truth["images"] = [image for image in truth["images"] if image["id"] in known]
            truth["annotations"] = [box for box in truth["annotations"] if box["image_id"] in known]
        self._metrics, self.last = _evaluate(truth, results, iou_type="bbox", max_detections=self._max_detections)
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


def crowded(annotations: Annotations, max_detections: int) -> str | None:
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
    """Return the ``count`` predictions of each class with the best scores, in their order; of equal scores the first ones.

    COCO's metrics count no others, and the evaluation spends most of its time on them where a model predicts much.
    """
    if len(detections) <= count:
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
    return list(iterate_results(annotations, predictions))


def iterate_results(annotations: Annotations, predictions: Mapping[int, Detections]) -> Iterator[dict[str, Any]]:
    """Yield the results of ``results_json``; millions of them would take gigabytes beside those that are scored."""
    for index, detections in predictions.items():
        image_id = annotations.samples[index].image_id  # a sample is made when it is asked for: not for each box
        for x1, y1, x2, y2, score, label in detections.tolist():
            yield {
                "image_id": image_id,
                "category_id": annotations.category_ids[int(label)],
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "score": score,
            }


def evaluate_files(annotations: Path, results: Path, *, iou_type: IouType = "bbox") -> dict[str, float]:
    """Compute the metrics of a COCO results file against a COCO annotation file, both used unchanged.

    Raises:
        DataError: a file cannot be read, or results name images that the annotations do not have.

    """
    truth = load_json(annotations)
    try:
        entries = parse_json(read_bytes(results, limit=MAX_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{results}: cannot be read ({error}); expected a COCO results file") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{results}: expected a list of results, found {type(entries).__name__}")
    known_ids = {image["id"] for image in truth["images"]}
    unknown_ids = sorted({str(entry.get("image_id")) for entry in entries if entry.get("image_id") not in known_ids})
    if unknown_ids:
        raise DataError(f"{results}: {len(unknown_ids)} images are not in {annotations}: {', '.join(unknown_ids[:20])}")
    return _evaluate(truth, entries, iou_type=iou_type)[0]


def _evaluate(
    truth: Mapping[str, Any],
    results: Iterable[Mapping[str, Any]],
    *,
    iou_type: IouType,
    max_detections: int = COCO_DETECTIONS,
) -> "tuple[dict[str, float], Scored | None]":
    from faster_coco_eval import (  # imported here because it is slow, and training starts without it
        COCO,
        COCOeval_faster,
    )

    # Predictions of equal score rank in the order of image ids: it must be the order of the original ids.
    ids = sorted(
        (image["id"] for image in truth["images"]), key=lambda i: (0, i, "") if isinstance(i, int) else (1, 0, i)
    )
    numbers = {original: number for number, original in enumerate(ids, start=1)}
    dataset = {
        "images": [{**image, "id": numbers[image["id"]]} for image in truth["images"]],
        # Ids start at 1: the evaluation treats an object with id 0 as not matched.
        "annotations": [
            {**annotation, "id": i, "image_id": numbers[annotation["image_id"]]}
            for i, annotation in enumerate(truth["annotations"], start=1)
        ],
        "categories": list(truth["categories"]),
    }
    # faster-coco-eval makes a polygon of each box that has none, and uses none of them to score boxes.
    outline: Mapping[str, Any] = {"segmentation": []} if iou_type == "bbox" else {}
    renumbered = [{**entry, "image_id": numbers[entry["image_id"]], **outline} for entry in results]
    discard_output = _ignore
    reference = COCO(dataset, print_function=discard_output)
    if not renumbered:
        return _nothing_found(dataset), None
    evaluation = COCOeval_faster(
        reference, reference.loadRes(renumbered), iouType=iou_type, print_function=discard_output, rle_iou_max_workers=1
    )
    evaluation.params.maxDets = sorted({1, 10, COCO_DETECTIONS, max_detections})
    evaluation.evaluate()
    evaluation.accumulate()
    metrics = _averages(evaluation) | _per_class(evaluation, dataset["categories"])
    place = {category: number for number, category in enumerate(evaluation.params.catIds)}
    order = [place[category["id"]] for category in dataset["categories"]]
    precision = evaluation.eval["precision"][:, :, order, 0, -1]
    return metrics, Scored(dataset=dataset, results=renumbered, precision=precision)


def _averages(evaluation: Any) -> dict[str, float]:
    """Average :data:`METRICS`. AP and recall by size use the largest number of predictions, AR1 to AR100 the number in
    their name."""
    precision = evaluation.eval["precision"]  # (IoU threshold, recall, class, area range, largest number)
    recall = evaluation.eval["recall"]  # (IoU threshold, class, area range, largest number)
    threshold_percents = [round(100 * threshold) for threshold in evaluation.params.iouThrs]
    detection_limits = list(evaluation.params.maxDets)
    values = {
        "AP": precision[:, :, :, 0, -1],
        "AP50": precision[threshold_percents.index(50), :, :, 0, -1],
        "AP75": precision[threshold_percents.index(75), :, :, 0, -1],
        **{name: precision[:, :, :, area, -1] for area, name in enumerate(("APs", "APm", "APl"), start=1)},
        **{f"AR{count}": recall[:, :, 0, detection_limits.index(count)] for count in (1, 10, COCO_DETECTIONS)},
        **{name: recall[:, :, area, -1] for area, name in enumerate(("ARs", "ARm", "ARl"), start=1)},
    }
    return {name: _mean(values[name]) for name in METRICS}


def _mean(values: NDArray[np.float64]) -> float:
    """Return the mean of the measured values; -1 if there are none."""
    measured = values[values > -1]
    return float(measured.mean()) if measured.size else -1.0


def _ignore(*_: object) -> None:
    """Replace faster-coco-eval's print function and print nothing."""


def _per_class(evaluation: Any, categories: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    precision = evaluation.eval["precision"]  # (IoU threshold, recall, class, area range, largest number)
    names = {category["id"]: str(category["name"]) for category in categories}
    metrics: dict[str, float] = {}
    for place, category in enumerate(evaluation.params.catIds):
        values = precision[:, :, place, 0, -1]
        if (values > -1).any():
            metrics[f"AP/{names[category]}"] = float(values[values > -1].mean())
            at_half = values[0]
            metrics[f"AP50/{names[category]}"] = float(at_half[at_half > -1].mean())
    return metrics


def _nothing_found(dataset: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics for no predictions: 0 where objects exist, -1 where there are none."""
    objects = [a for a in dataset["annotations"] if not a.get("iscrowd")]
    areas = np.array([a["area"] for a in objects], dtype=np.float64)
    sizes = {"s": areas <= 32**2, "m": (areas >= 32**2) & (areas <= 96**2), "l": areas >= 96**2}
    metrics = {name: 0.0 if sizes.get(name[-1], areas >= 0).any() else -1.0 for name in METRICS}
    present = {a["category_id"] for a in objects}
    for category in dataset["categories"]:
        if category["id"] in present:
            metrics |= {f"AP/{category['name']}": 0.0, f"AP50/{category['name']}": 0.0}
    return metrics
