"""Classes are scored a few at a time, with the bits of one evaluation of all of them and a bounded number of pairs in memory."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from faster_coco_eval import COCO, COCOeval_faster

from benchmarks.growth.evaluation import annotations_of, predictions_of
from mtrain.tasks.detection import scoring
from mtrain.tasks.detection.details import details_of
from mtrain.tasks.detection.evaluator import CocoEvaluator, FoundBoxes, merge, results_json
from tests.data_readers.results_files import Listed

FILES = Path(__file__).parents[1] / "data" / "coco_eval"
TRUTH = FILES / "annotations" / "instances_val2014_100.json"
FOUND = FILES / "results" / "instances_val2014_fakebbox100_results.json"
IMAGES = 60


@pytest.fixture(scope="module")
def annotations():
    return annotations_of(IMAGES)


def partials_of(annotations):
    """Predictions of two ranks, with many equal scores, whose order counts."""
    partials = [predictions_of(annotations, rank) for rank in range(2)]
    for partial in partials:
        for boxes in partial.values():
            boxes[:, 4] = np.round(boxes[:, 4], 1)
    return partials


def scored_at_once(dataset, entries):
    """One evaluation of all classes on all images by faster-coco-eval, from files in COCO's form."""
    reference = COCO({**dataset, "annotations": [dict(each) for each in dataset["annotations"]]})
    evaluation = COCOeval_faster(reference, reference.loadRes(entries), "bbox", print_function=lambda *_: None)
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


@pytest.mark.parametrize("most_pairs", [1, IMAGES * 7, 10**9])
def test_classes_scored_in_parts_have_the_bits_of_all_at_once(annotations, monkeypatch, most_pairs):
    evaluator = CocoEvaluator(annotations)
    monkeypatch.setattr(scoring, "MOST_PAIRS", most_pairs)
    calls, real = [], scoring._evaluate
    monkeypatch.setattr(scoring, "_evaluate", lambda *given, **more: calls.append(given) or real(*given, **more))
    metrics = evaluator.result(partials_of(annotations))
    assert evaluator.last is not None
    whole = scored_at_once(evaluator.last.dataset, list(evaluator.last.results))
    assert np.array_equal(evaluator.last.precision, whole.eval["precision"][:, :, :, 0, -1])
    at_once = min(80, max(1, most_pairs // IMAGES))
    assert len(calls) <= -(-80 // at_once), "none where no image has a class"
    assert len(calls) >= 78 // at_once
    images = [len(np.union1d(objects.images_N, predicted.images_N)) for _, objects, predicted in calls]
    most = max(count * len(classes) for count, (classes, *_) in zip(images, calls, strict=True))
    assert most <= max(most_pairs, IMAGES)
    recall = whole.eval["recall"][:, :, 0, 2]
    assert metrics["AR100"] == float(recall[recall > -1].mean())


def test_the_pages_are_the_same_however_classes_are_scored(annotations, monkeypatch):
    shown = []
    for most_pairs in (1, 10**9):
        monkeypatch.setattr(scoring, "MOST_PAIRS", most_pairs)
        evaluator = CocoEvaluator(annotations)
        evaluator.result(partials_of(annotations))
        shown.append(repr(details_of(evaluator.last, max_detections=100)))
    assert shown[0] == shown[1]


def test_files_with_crowds_have_the_bits_of_one_evaluation_of_them(monkeypatch):
    truth, entries = json.loads(TRUTH.read_text()), json.loads(FOUND.read_text())
    for most_pairs in (10**9, 1):
        monkeypatch.setattr(scoring, "MOST_PAIRS", most_pairs)
        scored = scoring.score(truth, Listed(entries=entries))[1]
        whole = scored_at_once(scored.dataset, list(scored.results))
        assert np.array_equal(scored.precision, whole.eval["precision"][:, :, :, 0, -1])


def test_predictions_by_class_are_those_of_all(annotations):
    found = FoundBoxes(annotations, merge(partials_of(annotations)))
    everything = results_json(annotations, merge(partials_of(annotations)))
    assert list(found) == everything
    numbers = {image_id: image_id + 1 for image_id in range(IMAGES)}
    for category_ids in ({3}, {1, 80}, set(annotations.category_ids)):
        wanted = Listed(entries=everything).of(category_ids, numbers)
        chosen = found.of(category_ids, numbers)
        for name in chosen.__slots__:
            assert np.array_equal(getattr(chosen, name), getattr(wanted, name)), name


def test_a_class_without_objects_and_predictions_has_nothing_to_measure(annotations, monkeypatch):
    monkeypatch.setattr(scoring, "MOST_PAIRS", 1)
    predictions = merge(partials_of(annotations))
    no_third = {index: boxes[boxes[:, 5] != 2] for index, boxes in predictions.items()}
    truth = dict(annotations.ground_truth)
    truth["annotations"] = [each for each in truth["annotations"] if each["category_id"] != 3]
    metrics, scored = scoring.score(truth, FoundBoxes(annotations, no_third))
    assert scored is not None
    assert (scored.precision[:, :, 2] == -1).all()
    assert "AP/class 2" not in metrics
    only_objects = {index: boxes[boxes[:, 5] == 0] for index, boxes in predictions.items()}
    metrics, scored = scoring.score(dict(annotations.ground_truth), FoundBoxes(annotations, only_objects))
    assert scored is not None
    assert metrics["AP/class 2"] == 0.0, "objects that nothing was predicted for"


def test_predictions_of_unknown_classes_where_there_are_no_objects_measure_nothing(annotations):
    """A file of results may name any class."""
    truth = {**annotations.ground_truth, "annotations": []}
    unknown = {"image_id": truth["images"][0]["id"], "category_id": 4711, "bbox": [1, 2, 3, 4], "score": 0.5}
    metrics, scored = scoring.score(truth, Listed(entries=[unknown]))
    assert scored is None
    assert metrics == dict.fromkeys(scoring.METRICS, -1.0)


def test_predictions_are_held_in_arrays_and_made_anew_for_each_reader(annotations):
    evaluator = CocoEvaluator(annotations)
    evaluator.result(partials_of(annotations))
    first, again = (list(islice(evaluator.last.results, 5)) for _ in range(2))
    assert first == again
    assert first[0] is not again[0]
