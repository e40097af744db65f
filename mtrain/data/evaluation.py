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

from mtrain.core.errors import DataError
from mtrain.core.files import parse_json, read_bytes
from mtrain.core.interfaces import HostBatch
from mtrain.data.coco_json import MAX_BYTES, load_json
from mtrain.data.sample import Annotations

Detections: TypeAlias = NDArray[np.float64]
"""(K, 6): x1, y1, x2, y2 in pixels of the picture as displayed, score, class index."""
IouType: TypeAlias = Literal["bbox", "segm"]

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""Average precision: over IoU 0.50:0.95, at 0.50, at 0.75, then for small (area < 32^2), medium, large (> 96^2)
objects; average recall with 1, 10, 100 predictions a picture, then by size."""


class CocoEvaluator:
    """Implements :class:`mtrain.core.interfaces.Evaluator` for detection."""

    figures: ClassVar[Sequence[str]] = (*FIGURES, "score")
    headline: ClassVar[Sequence[str]] = ("AP", "AP50", "AP75", "AR100")

    def __init__(self, annotations: Annotations) -> None:
        self._annotations = annotations
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
        """All of :data:`FIGURES`, ``AP/<class>`` and ``AP50/<class>`` of classes that occur, and ``score`` (= AP)."""
        results = results_json(self._annotations, merge(partials))
        self._figures = _evaluate(dict(self._annotations.ground_truth), results, iou_type="bbox")
        return {"score": self._figures["AP"], **self._figures}

    def remarks(self) -> list[str]:
        """AP by the size of objects."""
        sizes = {"small": "APs", "medium": "APm", "large": "APl"}
        if not self._figures:
            return []
        return ["AP by size: " + "  ".join(f"{size} {_or_none(self._figures[name])}" for size, name in sizes.items())]


def _or_none(figure: float) -> str:
    """COCO's -1 says that there is nothing of this size to find."""
    return f"{figure:.4g}" if figure >= 0 else "none there"


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


def _evaluate(truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], *, iou_type: IouType) -> dict[str, float]:
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
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    figures = dict(zip(FIGURES, (float(value) for value in evaluation.stats[: len(FIGURES)]), strict=True))
    return figures | _per_class(evaluation, dataset["categories"])


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
