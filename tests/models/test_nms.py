"""Suppression keeps what the plain greedy rule keeps."""

from dataclasses import replace

import numpy as np
import pytest

from mtrain.models.common import nms
from mtrain.models.common.nms import Selection, detections, detections_by_class, suppress
from mtrain.models.yolov5.model import YOLOv5n, YOLOv5Options
from tests.backends.compiler import needs_a_compiler
from tests.selection import under_torch

pytestmark = under_torch
ALL = Selection(confidence=0.001, iou_threshold=0.6, max_detections=300, multi_label=True, class_agnostic=False)


@pytest.fixture(params=["numpy", pytest.param("compiled", marks=needs_a_compiler)], autouse=True)
def _way(request, monkeypatch):
    """Suppression in numpy, and as the compiled loop."""
    if request.param == "numpy":
        monkeypatch.setattr(nms, "load_greedy", lambda: None)
    else:
        assert nms.load_greedy() is not None


def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    inter = max(width, 0) * max(height, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter
    return inter / union if union > 0 else 0.0


def plainly(boxes, scores, classes, threshold, limit):
    saved = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if len(saved) == limit:
            break
        if all(classes[i] != classes[k] or iou(boxes[i], boxes[k]) <= threshold for k in saved):
            saved.append(i)
    return saved


def crowd(rng, count, spread=200):
    low = rng.uniform(0, spread, (count, 2))
    return np.concatenate((low, low + rng.uniform(5, 90, (count, 2))), axis=1)


@pytest.mark.parametrize("count", [0, 1, 2, 47, 48, 49, 300, 700])
@pytest.mark.parametrize("classes", [1, 4])
@pytest.mark.parametrize("threshold", [0.3, 0.6])
def test_the_same_boxes_as_one_by_one(count, classes, threshold):
    rng = np.random.default_rng(count + classes)
    boxes, scores, groups = crowd(rng, count), rng.random(count), rng.integers(0, classes, count)
    for limit in (10, 10_000):
        actual = suppress(boxes, scores, groups, iou_threshold=threshold, max_kept=limit)
        assert actual.tolist() == plainly(boxes, scores, groups, threshold, limit)


def test_equal_scores_keep_their_order():
    boxes = np.tile([[0.0, 0, 10, 10]], (200, 1))
    assert suppress(boxes, np.full(200, 0.5), iou_threshold=0.5, max_kept=300).tolist() == [0]


def test_a_box_falls_to_a_better_one_however_many_lie_between():
    far = np.arange(1100.0)[:, None] * 20
    boxes = np.concatenate((far, np.zeros_like(far), far + 10, np.full_like(far, 10)), axis=1)
    boxes[-1] = boxes[0]
    actual = suppress(boxes, np.linspace(1, 0.1, len(boxes)), iou_threshold=0.5, max_kept=2000)
    assert actual.tolist() == list(range(len(boxes) - 1))


def test_without_groups_classes_suppress_each_other():
    boxes, scores = np.asarray([[0.0, 0, 10, 10], [1, 0, 11, 10]]), np.asarray([0.5, 0.9])
    assert suppress(boxes, scores, np.asarray([0, 1]), iou_threshold=0.5, max_kept=9).tolist() == [1, 0]
    assert suppress(boxes, scores, None, iou_threshold=0.5, max_kept=9).tolist() == [1]


def row(x, objectness, *scores):
    return [x, 50.0, 20.0, 10.0, objectness, *scores]


def test_a_box_is_reported_for_each_class_or_for_its_best_one():
    decoded = np.asarray([row(50, 0.8, 0.5, 0.9), row(150, 0.5, 0.001, 0.4), row(250, 0.0005, 1, 1)], np.float32)
    every = detections(decoded, ALL)
    np.testing.assert_allclose(every[:, 4:], [[0.72, 1], [0.4, 0], [0.2, 1]], atol=1e-6)
    np.testing.assert_allclose(every[0, :4], [40, 45, 60, 55])
    best = YOLOv5n(YOLOv5Options(multi_label=False)).predictions({"decoded": decoded[None]}, {})[0]
    np.testing.assert_allclose(best[:, 4:], [[0.72, 1], [0.2, 1]], atol=1e-6)
    agnostic = YOLOv5n(YOLOv5Options(class_agnostic=True)).predictions({"decoded": decoded[None]}, {})[0]
    np.testing.assert_allclose(agnostic[:, 4:], [[0.72, 1], [0.2, 1]], atol=1e-6)


def test_nothing_found_is_an_empty_table():
    actual = detections(np.zeros((10, 8), np.float32), ALL)
    assert actual.shape == (0, 6)
    assert actual.dtype == np.float32


def test_only_the_best_candidates_and_detections_are_kept():
    rng = np.random.default_rng(0)
    decoded = np.concatenate(
        (rng.uniform(0, 600, (500, 2)), rng.uniform(5, 20, (500, 2)), rng.random((500, 3))), axis=1
    )
    few = Selection(
        confidence=0.0, iou_threshold=1.0, max_detections=7, multi_label=True, class_agnostic=False, max_candidates=20
    )
    scores = np.sort((decoded[:, 4:5] * decoded[:, 5:]).reshape(-1))[::-1]
    np.testing.assert_allclose(detections(decoded.astype(np.float32), few)[:, 4], scores[:7], rtol=1e-5)


def test_candidates_that_are_equal_to_the_last_one_within_the_limit_count_too():
    """Many objects may have one score, as from a network that was trained in half precision; none may be lost for that."""
    decoded = np.asarray(
        [row(50, 1.0, 0.9), *(row(x, 1.0, 0.5) for x in (150, 250, 350)), row(450, 1.0, 0.3)], np.float32
    )
    actual = detections(decoded, replace(ALL, max_candidates=2))
    np.testing.assert_allclose(actual[:, 4], [0.9, 0.5, 0.5, 0.5])
    boxes, scores = detections(decoded, ALL)[:, :4], decoded[:, 5:]
    limits = {"confidence": 0.1, "iou_threshold": 0.6, "max_detections": 9}
    by_class = detections_by_class(boxes, scores, max_candidates=2, **limits)
    np.testing.assert_allclose(by_class[:, 4], [0.9, 0.5, 0.5, 0.5])


def test_one_table_per_image():
    decoded = np.asarray([[row(50, 0.8, 0.5)], [row(50, 0.0, 0.5)]], np.float32)
    assert [len(table) for table in YOLOv5n().predictions({"decoded": decoded}, {})] == [1, 0]
