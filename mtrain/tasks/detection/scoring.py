"""Score detections by the metrics of COCO with faster-coco-eval, a few classes at a time."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""Average precision: over IoU 0.50:0.95, at 0.50, at 0.75, then for small (area < 32^2), medium, large (> 96^2)
objects; average recall with 1, 10, 100 predictions an image, then by size."""


COCO_DETECTIONS = 100
"""Number of predictions per image that COCO's metrics count, best scores first."""
MOST_PAIRS = 100_000
"""Most pairs of an image and a class that are scored at a time, unless one class has more."""
Entry: TypeAlias = Mapping[str, Any]
"""A prediction in COCO's results form."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Predictions or objects, a row each."""

    images_N: NDArray[np.int64]
    """Numbers of their images, from 1."""
    category_ids_N: NDArray[np.int64]
    boxes_N4: NDArray[np.float64]
    """``[x, y, width, height]`` in pixels."""
    areas_N: NDArray[np.float64]
    scores_N: NDArray[np.float64]
    """0 for objects."""
    crowd_N: NDArray[np.bool_]

    def at(self, places: NDArray[Any]) -> "Boxes":
        """Return those at places, or where a mask is true."""
        return Boxes(*(getattr(self, name)[places] for name in self.__slots__))

    def in_order(self) -> "Boxes":
        """Sort by class, image and score, best first; those of equal score stay in their order."""
        return self.at(np.lexsort((-self.scores_N, self.images_N, self.category_ids_N)))

    def pairs(self) -> dict[tuple[int, int], slice]:
        """Return the rows of each image and class that have any, of boxes in order."""
        keys = np.stack((self.images_N, self.category_ids_N))
        starts = np.flatnonzero(np.diff(keys, prepend=-1).any(axis=0)).tolist()
        rows = map(slice, starts, [*starts[1:], len(self.images_N)])
        return dict(zip(zip(*keys[:, starts].tolist(), strict=True), rows, strict=True))


class Found(Protocol):
    """Predictions that can be read again and again."""

    def __iter__(self) -> Iterator[Entry]:
        """Yield all, image by image."""
        ...

    def of(self, category_ids: Collection[Any], numbers: Mapping[Any, int]) -> Boxes:
        """Return those of some classes, those of each image in their order. ``numbers``: of the images, by id."""
        ...


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A result of COCO's evaluation, and what it was computed from."""

    dataset: Mapping[str, Any]
    """Images, objects and classes in COCO's form, with numbers from 1 as ids of images and objects."""
    found: Found
    """The predictions, with the ids of images as they were given."""
    numbers: Mapping[Any, int]
    """The number of each image in ``dataset``, by the id that it was given."""
    precision: NDArray[np.float64]
    """(IoU threshold 0.50:0.95, recall 0:1 in 101 steps, class in the order of ``dataset``), all sizes; -1: the class does not occur."""

    @property
    def results(self) -> Iterator[Entry]:
        """Yield the predictions in COCO's results form with the numbers of images."""
        return ({**entry, "image_id": self.numbers[entry["image_id"]]} for entry in self.found)


@dataclass(kw_only=True)
class Curves:
    """What COCO's evaluation computes, of all classes in the order of their ids; -1: there is nothing to measure."""

    category_ids: Sequence[Any]
    params: Any
    """The parameters of faster-coco-eval's evaluation, apart from those that are images and classes."""
    precision: NDArray[np.float64]
    """(IoU threshold, recall, class, area range, largest number)."""
    recall: NDArray[np.float64]
    """(IoU threshold, class, area range, largest number)."""


def score(
    truth: Mapping[str, Any], found: Found, *, max_detections: int = COCO_DETECTIONS
) -> tuple[dict[str, float], Scored | None]:
    """Return the metrics of predictions against ``truth`` in COCO's form, and what pages show; None where nothing is found."""
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
    if next(iter(found), None) is None:
        return _nothing_found(dataset), None
    curves = _curves(dataset, found, numbers, max_detections=max_detections)
    if curves is None:
        return _nothing_found(dataset), None
    metrics = _averages(curves) | _per_class(curves, dataset["categories"])
    place = {category: number for number, category in enumerate(curves.category_ids)}
    order = [place[category["id"]] for category in dataset["categories"]]
    precision = curves.precision[:, :, order, 0, -1]
    return metrics, Scored(dataset=dataset, found=found, numbers=numbers, precision=precision)


def _curves(
    dataset: Mapping[str, Any], found: Found, numbers: Mapping[Any, int], *, max_detections: int
) -> Curves | None:
    """Evaluate a few classes at a time, and join what is found; None where no class has an object or a prediction."""
    category_ids = sorted({category["id"] for category in dataset["categories"]})
    # faster-coco-eval keeps about a kilobyte for each pair of an image and a class, also where the image has neither an
    # object nor a prediction of the class: gigabytes for tens of thousands of images. No class has anything to do with
    # the scores of another, so a few are scored at a time, on the images that have any of them, with the same bits.
    at_once = max(1, MOST_PAIRS // max(1, len(dataset["images"])))
    objects = _objects(dataset["annotations"])
    joined: Curves | None = None
    for first in range(0, len(category_ids), at_once):
        chosen = category_ids[first : first + at_once]
        own = objects.at(np.isin(objects.category_ids_N, chosen)).in_order()
        predicted = found.of(set(chosen), numbers).in_order()
        if not len(own.images_N) and not len(predicted.images_N):
            continue
        evaluated = _evaluate(chosen, own, predicted, max_detections=max_detections)
        if joined is None:
            joined = _empty(category_ids, evaluated)
        joined.precision[:, :, first : first + at_once] = evaluated["precision"]
        joined.recall[:, first : first + at_once] = evaluated["recall"]
    return joined


def _objects(annotations: Sequence[Mapping[str, Any]]) -> Boxes:
    image_ids, category_ids = (
        np.array([each[name] for each in annotations], np.int64) for name in ("image_id", "category_id")
    )
    areas = np.array([each["area"] for each in annotations], np.float64)
    boxes = np.array([each["bbox"] for each in annotations], np.float64).reshape(-1, 4)
    crowd = np.array([bool(each.get("iscrowd")) for each in annotations], np.bool_)
    return Boxes(image_ids, category_ids, boxes, areas, np.zeros(len(boxes)), crowd)


def _evaluate(category_ids: Sequence[Any], objects: Boxes, predicted: Boxes, *, max_detections: int) -> Any:
    """Run faster-coco-eval on the boxes of some classes, which are in order; return its results.

    This calls its compiled part. Its Python part goes through a dictionary of each box seven times, which takes longer than to
    evaluate them.
    """
    import faster_coco_eval.faster_eval_api_cpp as library  # here because it is slow, and training starts without it
    from faster_coco_eval import COCOeval_faster, mask

    params = COCOeval_faster(iouType="bbox").params
    params.maxDets = sorted({1, 10, COCO_DETECTIONS, max_detections})
    params.imgIds, params.catIds = np.union1d(objects.images_N, predicted.images_N).tolist(), list(category_ids)
    images, classes = ({number: place for place, number in enumerate(ids)} for ids in (params.imgIds, params.catIds))
    overlaps: list[list[Any]] = [[[] for _ in classes] for _ in images]
    object_pairs, predicted_pairs = objects.pairs(), predicted.pairs()
    for (image, category), rows in predicted_pairs.items():
        to_find = object_pairs.get((image, category))
        if to_find is not None:
            best = slice(rows.start, min(rows.stop, rows.start + params.maxDets[-1]))
            parts = (predicted.boxes_N4[best], objects.boxes_N4[to_find], objects.crowd_N[to_find].tolist())
            overlaps[images[image]][classes[category]] = mask.iou(*parts)
    sides = [_filled(library.Dataset(), *side) for side in ((objects, object_pairs), (predicted, predicted_pairs))]
    return library.COCOevalEvaluateAccumulate(
        params, overlaps, *sides, params.imgIds, params.catIds, bool(params.useCats)
    )


def _filled(dataset: Any, boxes: Boxes, pairs: Mapping[tuple[int, int], slice]) -> Any:
    """Return faster-coco-eval's data set with boxes."""
    columns = range(1, 1 + len(boxes.areas_N)), boxes.areas_N.tolist(), boxes.scores_N.tolist()
    entries: list[dict[str, Any]] = [
        {"id": number, "area": area, "score": score} for number, area, score in zip(*columns, strict=True)
    ]
    for row in np.flatnonzero(boxes.crowd_N):
        entries[row] |= {"iscrowd": True, "ignore": True}
    dataset.load_tuple((len(pairs), [(*pair, entries[rows]) for pair, rows in pairs.items()]))
    return dataset


def _empty(category_ids: Sequence[Any], evaluated: Any) -> Curves:
    """Return curves of all classes without anything measured, in the form of those that were evaluated."""
    thresholds, recalls, _, areas, limits = evaluated["precision"].shape
    return Curves(
        category_ids=category_ids,
        params=evaluated["params"],
        precision=np.full((thresholds, recalls, len(category_ids), areas, limits), -1.0),
        recall=np.full((thresholds, len(category_ids), areas, limits), -1.0),
    )


def _averages(curves: Curves) -> dict[str, float]:
    """Average :data:`METRICS`. AP and recall by size use the largest number of predictions, AR1 to AR100 the number in
    their name."""
    precision = curves.precision
    recall = curves.recall
    threshold_percents = [round(100 * threshold) for threshold in curves.params.iouThrs]
    detection_limits = list(curves.params.maxDets)
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


def _per_class(curves: Curves, categories: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    precision = curves.precision
    names = {category["id"]: str(category["name"]) for category in categories}
    metrics: dict[str, float] = {}
    for place, category in enumerate(curves.category_ids):
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
