"""COCO average precision with faster-coco-eval, over all ranks and every picture once.

Figures are those of the COCO evaluation (https://cocodataset.org/#detection-eval): areas come from the annotation,
crowds match any number of predictions and count for neither side. A figure for which there is nothing to measure is
-1, as pycocotools has it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import HostBatch
from mtrain.errors import DataError
from mtrain.files import parse_json, read_bytes
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.readers.coco_json import MAX_BYTES, load_json

Detections: TypeAlias = NDArray[np.float64]
"""(K, 6): x1, y1, x2, y2 in pixels of the picture as displayed, score, class index."""
IouType: TypeAlias = Literal["bbox", "segm"]

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""Average precision: over IoU 0.50:0.95, at 0.50, at 0.75, then for small (area < 32^2), medium, large (> 96^2)
objects; average recall with 1, 10, 100 predictions a picture, then by size."""


COCO_DETECTIONS = 100
"""The best predictions of a picture that COCO's figures count."""
NO_BOXES = "no boxes in the evaluation split: there is nothing to score"


class CocoEvaluator:
    """Implements :class:`mtrain.core.interfaces.Evaluator` for detection."""

    figures: ClassVar[Sequence[str]] = (*FIGURES, "score")
    headline: ClassVar[Sequence[str]] = ("AP", "AP50", "AP75", "AR100")

    def __init__(self, annotations: Annotations, *, max_detections: int = COCO_DETECTIONS) -> None:
        """``max_detections``: the best predictions of a picture that average precision counts."""
        self._annotations = annotations
        self._max_detections = max_detections
        self._predicted = 0
        self._found: dict[int, Detections] = {}
        self._figures: dict[str, float] = {}

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Take one micro batch. A picture seen before is left out.

        ``batch["index"]`` int64 (B,): place in ``annotations.samples``. ``batch["scale_pad"]`` float32 (B, 4):
        ratio_w, ratio_h, pad_w, pad_h of the letterbox. ``predictions``: B arrays (K, 6) of x1, y1, x2, y2 in pixels
        of the network input, score, class index.
        """
        for index, scale_pad, found in zip(batch["index"], batch["scale_pad"], predictions, strict=True):
            if int(index) not in self._found:
                sample = self._annotations.samples[int(index)]
                self._found[int(index)] = to_picture(found, scale_pad, width=sample.width, height=sample.height)

    def partial(self) -> dict[int, Detections]:
        """Predictions of this rank by sample index, in pixels of the pictures."""
        return self._found

    def result(self, partials: Sequence[Mapping[int, Detections]]) -> dict[str, float]:
        """All of :data:`FIGURES`, ``AP/<class>`` and ``AP50/<class>`` of classes that occur, and ``score`` (= AP).

        Empty where the split has no boxes: there is nothing to score.
        """
        if not box_counts(self._annotations).any():
            return {}
        results = results_json(self._annotations, merge(partials))
        self._predicted = len(results)
        truth = dict(self._annotations.ground_truth)
        self._figures = _evaluate(truth, results, iou_type="bbox", max_detections=self._max_detections)
        return {"score": self._figures["AP"], **self._figures}

    def remarks(self) -> list[str]:
        """AP by the size of objects, and why there may be none."""
        sizes = {"small": "APs", "medium": "APm", "large": "APl"}
        if not self._figures:
            return [] if box_counts(self._annotations).any() else [NO_BOXES]
        parts = [f"{size} {self._figures[name]:.4g}" for size, name in sizes.items() if self._figures[name] >= 0]
        absent = [f"no {size} objects" for size, name in sizes.items() if self._figures[name] < 0]
        lines = ["AP by size: " + "  ".join(parts + absent)]
        if not self._predicted:
            lines.append(
                "no box was predicted in any picture: early in training that is usual; later, look at the rate, the labels "
                "(`mtrain data check`) and where model.weights comes from"
            )
        return lines


def box_counts(annotations: Annotations) -> NDArray[np.int64]:
    """(N,) boxes to find in each picture; crowds do not count."""
    return np.array([int((~sample.crowd).sum()) for sample in annotations.samples], dtype=np.int64)


def crowded(annotations: Annotations, max_detections: int) -> str | None:
    """A sentence for a split in which more boxes lie on some picture than ``max_detections`` predictions can find."""
    counts = box_counts(annotations)
    above = int((counts > max_detections).sum())
    if not above:
        return None
    return (
        f"{above} pictures have more than {max_detections} boxes (up to {counts.max()}), but AP counts the best "
        f"{max_detections} predictions of a picture, so it cannot reach 1; raise evaluate.max_detections to {counts.max()}"
    )


def merge(partials: Sequence[Mapping[int, Detections]]) -> dict[int, Detections]:
    """Predictions of all ranks by sample index, each picture once, in order of the index."""
    union: dict[int, Detections] = {}
    for partial in partials:
        for index, found in partial.items():
            union.setdefault(index, found)
    return dict(sorted(union.items()))


def to_picture(found: Any, scale_pad: Any, *, width: int, height: int) -> Detections:
    """Boxes of the letterboxed input as boxes of the picture, clipped to it: x_picture = (x - pad) / ratio."""
    boxes = np.array(found, dtype=np.float64).reshape(-1, 6)
    ratio, pad = np.tile(np.asarray(scale_pad[:2], np.float64), 2), np.tile(np.asarray(scale_pad[2:], np.float64), 2)
    limit = np.array([width, height, width, height], dtype=np.float64)
    boxes[:, :4] = np.clip((boxes[:, :4] - pad) / ratio, 0.0, limit)
    return boxes


def results_json(annotations: Annotations, found: Mapping[int, Detections]) -> list[dict[str, Any]]:
    """Predictions in the COCO results form, with the annotation file's own ids."""
    return [
        {
            "image_id": annotations.samples[index].image_id,
            "category_id": annotations.category_ids[int(label)],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": score,
        }
        for index, detections in found.items()
        for x1, y1, x2, y2, score, label in detections.tolist()
    ]


def evaluate_files(annotations: Path, results: Path, *, iou_type: IouType = "bbox") -> dict[str, float]:
    """Figures of a COCO results file against a COCO annotation file, both given as they are.

    Raises:
        DataError: a file cannot be read, or results name pictures that the annotations do not have.

    """
    truth = load_json(annotations)
    try:
        found = parse_json(read_bytes(results, limit=MAX_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"{results}: cannot be read ({error}); expected a COCO results file") from error
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise DataError(f"{results}: expected a list of results, found {type(found).__name__}")
    known = {image["id"] for image in truth["images"]}
    unknown = sorted({str(entry.get("image_id")) for entry in found if entry.get("image_id") not in known})
    if unknown:
        raise DataError(f"{results}: {len(unknown)} pictures are not in {annotations}: {', '.join(unknown[:20])}")
    return _evaluate(truth, found, iou_type=iou_type)


def _evaluate(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    *,
    iou_type: IouType,
    max_detections: int = COCO_DETECTIONS,
) -> dict[str, float]:
    from faster_coco_eval import (  # not at the top: it takes a while, and training starts without it
        COCO,
        COCOeval_faster,
    )

    # Predictions of equal score rank in the order of picture ids: it must be the order of the original ids.
    ids = sorted(
        (image["id"] for image in truth["images"]), key=lambda i: (0, i, "") if isinstance(i, int) else (1, 0, i)
    )
    numbers = {original: number for number, original in enumerate(ids, start=1)}
    dataset = {
        "images": [{**image, "id": numbers[image["id"]]} for image in truth["images"]],
        # Ids from 1: the evaluation takes an object with id 0 for one that was not matched.
        "annotations": [
            {**annotation, "id": i, "image_id": numbers[annotation["image_id"]]}
            for i, annotation in enumerate(truth["annotations"], start=1)
        ],
        "categories": list(truth["categories"]),
    }
    renumbered = [{**entry, "image_id": numbers[entry["image_id"]]} for entry in results]
    quiet = _ignore
    reference = COCO(dataset, print_function=quiet)
    if not renumbered:
        return _nothing_found(dataset)
    evaluation = COCOeval_faster(
        reference, reference.loadRes(renumbered), iouType=iou_type, print_function=quiet, rle_iou_max_workers=1
    )
    evaluation.params.maxDets = sorted({1, 10, COCO_DETECTIONS, max_detections})
    evaluation.evaluate()
    evaluation.accumulate()
    return _averages(evaluation) | _per_class(evaluation, dataset["categories"])


def _averages(evaluation: Any) -> dict[str, float]:
    """:data:`FIGURES`. AP and recall by size count as many predictions as are allowed, AR1 to AR100 as many as they say."""
    precision = evaluation.eval["precision"]  # (IoU threshold, recall, class, area range, largest number)
    recall = evaluation.eval["recall"]  # (IoU threshold, class, area range, largest number)
    at = [round(100 * threshold) for threshold in evaluation.params.iouThrs]
    most = list(evaluation.params.maxDets)
    values = {
        "AP": precision[:, :, :, 0, -1],
        "AP50": precision[at.index(50), :, :, 0, -1],
        "AP75": precision[at.index(75), :, :, 0, -1],
        **{name: precision[:, :, :, area, -1] for area, name in enumerate(("APs", "APm", "APl"), start=1)},
        **{f"AR{count}": recall[:, :, 0, most.index(count)] for count in (1, 10, COCO_DETECTIONS)},
        **{name: recall[:, :, area, -1] for area, name in enumerate(("ARs", "ARm", "ARl"), start=1)},
    }
    return {name: _mean(values[name]) for name in FIGURES}


def _mean(values: NDArray[np.float64]) -> float:
    """Mean of what was measured; -1 where nothing was."""
    measured = values[values > -1]
    return float(measured.mean()) if measured.size else -1.0


def _ignore(*_: object) -> None:
    """Stands where faster-coco-eval would print."""


def _per_class(evaluation: Any, categories: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    precision = evaluation.eval["precision"]  # (IoU threshold, recall, class, area range, largest number)
    names = {category["id"]: str(category["name"]) for category in categories}
    figures: dict[str, float] = {}
    for place, category in enumerate(evaluation.params.catIds):
        values = precision[:, :, place, 0, -1]
        if (values > -1).any():
            figures[f"AP/{names[category]}"] = float(values[values > -1].mean())
            at_half = values[0]
            figures[f"AP50/{names[category]}"] = float(at_half[at_half > -1].mean())
    return figures


def _nothing_found(dataset: Mapping[str, Any]) -> dict[str, float]:
    """All zeros where there is something to find, -1 where not."""
    real = [a for a in dataset["annotations"] if not a.get("iscrowd")]
    areas = np.array([a["area"] for a in real], dtype=np.float64)
    sizes = {"s": areas <= 32**2, "m": (areas >= 32**2) & (areas <= 96**2), "l": areas >= 96**2}
    figures = {name: 0.0 if sizes.get(name[-1], areas >= 0).any() else -1.0 for name in FIGURES}
    present = {a["category_id"] for a in real}
    for category in dataset["categories"]:
        if category["id"] in present:
            figures |= {f"AP/{category['name']}": 0.0, f"AP50/{category['name']}": 0.0}
    return figures
