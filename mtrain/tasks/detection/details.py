"""Describe a result of detection for pages: precision over recall, and which classes are taken for which."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces.details import Chart, Detail, Series
from mtrain.tasks.confusion import confusion
from mtrain.tasks.detection.scoring import Scored

MAX_CURVES = 8
"""Largest number of classes whose precision is drawn, those with the most objects."""
IOU = 0.5
SCORE = 0.25
"""Predictions and objects of the confusion matrix belong together from this IoU on; lower scores are left out."""
NOTHING = "nothing"
"""Row of predictions that belong to no object, and column of objects that were not found."""


def details_of(scored: Scored, *, max_detections: int) -> list[Detail]:
    """Return the curves of precision over recall, and the confusion matrix."""
    names = [str(category["name"]) for category in scored.dataset["categories"]]
    counts = confusion_counts(scored, max_detections=max_detections)
    title = f"Confusion (IoU from {IOU:g}, score from {SCORE:g})"
    return [
        _all_classes(scored),
        _by_class(scored, names),
        confusion(title, names, counts, unit="objects", absent=NOTHING),
    ]


def _all_classes(scored: Scored) -> Chart:
    """Return the precision at three IoU thresholds, averaged over the classes that occur."""
    occurring = (scored.precision > -1).any(axis=(0, 1))
    curves = {f"IoU {0.5 + 0.05 * place:.2f}": scored.precision[place][:, occurring] for place in (0, 5, 8)}
    series = [_series(label, values.mean(axis=1)) for label, values in curves.items() if values.size]
    return _chart("Precision over recall", series, note="mean of all classes, at three IoU thresholds")


def _by_class(scored: Scored, names: Sequence[str]) -> Chart:
    ids = [category["id"] for category in scored.dataset["categories"]]
    objects = Counter(annotation["category_id"] for annotation in scored.dataset["annotations"])
    counts = np.array([objects[number] for number in ids])
    order = [int(label) for label in np.argsort(-counts, kind="stable")[:MAX_CURVES] if counts[label]]
    series = [_series(names[label], scored.precision[0][:, label]) for label in order]
    note = f"the {MAX_CURVES} classes with the most objects" if len(names) > MAX_CURVES else "each class"
    return _chart(f"Precision over recall at IoU {IOU:g}", series, note=note)


def _series(label: str, precision: NDArray[np.float64]) -> Series:
    recall = np.linspace(0, 1, len(precision))
    values = [round(value, 4) if value >= 0 else None for value in precision.tolist()]
    return Series(label=label, x=[round(value, 4) for value in recall.tolist()], y=values)


def _chart(title: str, series: list[Series], *, note: str) -> Chart:
    return Chart(title=title, note=note, x_title="recall", x_range=(0, 1), y_range=(0, 1), series=series)


def confusion_counts(scored: Scored, *, max_detections: int) -> NDArray[np.int64]:
    """Return (C + 1, C + 1) the number of objects by true and predicted class; the last of each is ``NOTHING``.

    Crowds, and predictions that belong to one, count nowhere.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    labels = {category["id"]: label for label, category in enumerate(scored.dataset["categories"])}
    nothing = len(labels)
    reference = COCO(dict(scored.dataset), print_function=_ignore)
    kept = [dict(entry) for entry in scored.results if entry["score"] >= SCORE]
    matched: dict[int, int] = {}
    found: dict[int, Any] = {}
    if kept:
        predictions = reference.loadRes(kept)
        found = predictions.anns
        evaluation = COCOeval_faster(
            reference, predictions, "bbox", extra_calc=True, print_function=_ignore, rle_iou_max_workers=1
        )
        # A prediction may belong to an object of another class: that is what the matrix shows.
        evaluation.params.useCats = 0
        evaluation.params.iouThrs = np.array([IOU])
        # One range of areas: with COCO's four, each pair would be matched four times.
        evaluation.params.areaRng = [[0, 1e10]]
        evaluation.params.maxDets = [max_detections]
        evaluation.evaluate()
        evaluation.accumulate()
        # With ``extra_calc``, faster-coco-eval names each match "prediction_object".
        matched = {int(d): int(g) for d, g in (pair.split("_") for pair in evaluation.eval["matched"])}
    crowds = {number for number, truth in reference.anns.items() if truth.get("iscrowd")}
    hit = set(matched.values())
    pairs = [
        (
            labels[reference.anns[matched[number]]["category_id"]] if number in matched else nothing,
            labels[entry["category_id"]],
        )
        for number, entry in found.items()
        if matched.get(number) not in crowds
    ]
    pairs += [
        (labels[truth["category_id"]], nothing)
        for number, truth in reference.anns.items()
        if number not in hit and number not in crowds
    ]
    counts = np.zeros((nothing + 1,) * 2, dtype=np.int64)
    np.add.at(counts, tuple(np.array(pairs, dtype=np.int64).reshape(-1, 2).T), 1)
    return counts


def _ignore(*_: object) -> None:
    """Replace faster-coco-eval's print function and print nothing."""
