"""The metrics equal those of the COCO evaluation to six decimals, for any number of ranks and any order."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.interfaces import SplitRequest
from mtrain.tasks.detection.annotations import Annotations
from mtrain.tasks.detection.evaluator import (
    CocoEvaluator,
    best_of_classes,
    merge,
    results_json,
    to_image,
    warn_of_crowds,
)
from mtrain.tasks.detection.readers.coco import Coco, read_content
from mtrain.tasks.detection.scoring import METRICS
from tests.data_readers.results_files import evaluate_files

DATA = Path(__file__).parents[1] / "data"
COCO = DATA / "coco_eval"
TRUTH = COCO / "annotations" / "instances_val2014_100.json"
FOUND = COCO / "results" / "instances_val2014_fakebbox100_results.json"
EXPECTED = json.loads((COCO / "expected.json").read_text())


def test_twelve_metrics_equal_pycocotools_to_six_decimals() -> None:
    metrics = evaluate_files(TRUTH, FOUND)
    for name, value in EXPECTED["measured_pycocotools_2_0_11"]["bbox"].items():
        assert metrics[name] == pytest.approx(value, abs=5e-7), name
    for name, value in EXPECTED["published_3_decimals"]["bbox"].items():
        assert round(metrics[name], 3) == value, name


@pytest.fixture(scope="module")
def real() -> Annotations:
    return read_content(json.loads(TRUTH.read_text()), folder=Path("x"), file=TRUTH)


def published_batches(annotations: Annotations, *, ratio: float, pad: float) -> list[tuple[dict, np.ndarray]]:
    """The published detections as a network would give them: one image a batch, in pixels of its input."""
    label = {category: i for i, category in enumerate(annotations.category_ids)}
    rows: dict[object, list[list[float]]] = {}
    for r in json.loads(FOUND.read_text()):
        x, y, w, h = r["bbox"]
        corners = [value * ratio + pad for value in (x, y, x + w, y + h)]
        rows.setdefault(r["image_id"], []).append([*corners, r["score"], label[r["category_id"]]])
    return [
        (
            {"index": np.array([i]), "scale_pad": np.array([[ratio, ratio, pad, pad]], dtype=np.float32)},
            np.array(rows.get(sample.image_id, []), dtype=np.float64).reshape(-1, 6),
        )
        for i, sample in enumerate(annotations.samples)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_evaluator_gives_the_published_metrics_over_any_ranks_with_padding(real: Annotations, ranks: int) -> None:
    batches = published_batches(real, ratio=0.5, pad=16.0)
    evaluators = [CocoEvaluator(real) for _ in range(ranks)]
    for i, (batch, rows) in enumerate(batches):
        evaluators[i % ranks].add(batch, [rows])
    for evaluator in evaluators:  # padding: everybody sees the first image again, with other predictions
        evaluator.add(batches[0][0], [np.array([[0, 0, 9, 9, 0.99, 0.0]])])
    metrics = CocoEvaluator(real).result([evaluator.partial() for evaluator in evaluators])
    for name, value in EXPECTED["measured_pycocotools_2_0_11"]["bbox"].items():
        assert metrics[name] == pytest.approx(value, abs=5e-7), name
    assert metrics["score"] == metrics["AP"]


def test_per_class_metrics_average_to_the_whole(real: Annotations) -> None:
    metrics = evaluate_files(TRUTH, FOUND)
    single = [value for name, value in metrics.items() if name.startswith("AP/")]
    assert len(single) == 70
    assert np.mean(single) == pytest.approx(metrics["AP"], abs=1e-12)
    at_half = [value for name, value in metrics.items() if name.startswith("AP50/")]
    assert np.mean(at_half) == pytest.approx(metrics["AP50"], abs=1e-12)


@pytest.mark.parametrize("mistake", ["crowds_dropped", "area_is_width_times_height"])
def test_known_mistakes_would_be_seen(tmp_path: Path, mistake: str) -> None:
    content = json.loads(TRUTH.read_text())
    if mistake == "crowds_dropped":
        content["annotations"] = [a for a in content["annotations"] if not a["iscrowd"]]
    else:
        for a in content["annotations"]:
            a["area"] = a["bbox"][2] * a["bbox"][3]
    (tmp_path / "a.json").write_text(json.dumps(content))
    metrics = evaluate_files(tmp_path / "a.json", FOUND)
    right = EXPECTED["measured_pycocotools_2_0_11"]["bbox"]
    assert max(abs(metrics[name] - right[name]) for name in METRICS) > 5e-4


def test_perfect_predictions_score_what_the_zero_area_box_leaves() -> None:
    annotations = Coco().read(SplitRequest(root=DATA / "bccd_small", split="val"))
    perfect = {
        i: np.concatenate([s.boxes, np.ones((len(s.boxes), 1)), s.labels[:, None]], axis=1, dtype=np.float64)
        for i, s in enumerate(annotations.samples)
    }
    metrics = CocoEvaluator(annotations).result([perfect])
    assert metrics["AP/WBC"] == pytest.approx(1.0)
    assert 0.9 < metrics["AP/RBC"] < 1.0


@pytest.mark.parametrize("rows", [[], [[0, 0, 5, 5, 0.9, 0]]])
def test_nothing_right_scores_zero_and_nothing_to_find_scores_minus_one(rows: list[list[float]]) -> None:
    content = {
        "images": [{"id": "a", "file_name": "a.jpg", "width": 300, "height": 300}],
        "annotations": [{"id": 0, "image_id": "a", "category_id": 0, "bbox": [99, 99, 20, 20], "area": 400}],
        "categories": [{"id": 0, "name": "thing"}, {"id": 1, "name": "absent"}],
    }
    annotations = read_content(content, folder=Path("x"), file=Path("x.json"))
    actual = {0: np.array(rows, dtype=np.float64).reshape(-1, 6)}
    metrics = CocoEvaluator(annotations).result([actual])
    assert {n: metrics[n] for n in ("AP", "APs", "APm", "APl", "AR100", "ARl")} == {
        "AP": 0.0, "APs": 0.0, "APm": -1.0, "APl": -1.0, "AR100": 0.0, "ARl": -1.0,
    }  # fmt: skip
    assert metrics["AP/thing"] == 0.0
    assert "AP/absent" not in metrics


def test_the_object_with_id_zero_and_text_ids_are_matched() -> None:
    content = {
        "images": [{"id": "a", "file_name": "a.jpg", "width": 300, "height": 300}],
        "annotations": [{"id": 0, "image_id": "a", "category_id": 0, "bbox": [99, 99, 20, 20], "area": 400}],
        "categories": [{"id": 0, "name": "thing"}],
    }
    annotations = read_content(content, folder=Path("x"), file=Path("x.json"))
    actual = {0: np.array([[99, 99, 119, 119, 0.9, 0]])}
    assert CocoEvaluator(annotations).result([actual])["AP"] == pytest.approx(1.0)
    assert results_json(annotations, actual)[0]["image_id"] == "a"


def test_an_image_is_looked_up_once_and_not_for_each_of_its_boxes(real: Annotations) -> None:
    class Counted(list[object]):
        asked = 0

        def __getitem__(self, index: object) -> object:
            self.asked += 1
            return super().__getitem__(index)  # type: ignore[index]

    samples = Counted(real.samples)
    rows = results_json(replace(real, samples=samples), {3: np.ones((50, 6)), 7: np.ones((40, 6))})
    assert (len(rows), samples.asked) == (90, 2)


def test_boxes_return_to_the_image_and_are_clipped() -> None:
    actual = np.array([[32, 80, 352, 400, 0.5, 2], [-50, 0, 999, 999, 0.4, 1]])
    boxes = to_image(actual, np.array([0.5, 0.5, 0, 80]), width=640, height=480)
    assert boxes.tolist() == pytest.approx(np.array([[64, 0, 640, 480, 0.5, 2], [0, 0, 640, 480, 0.4, 1]]), abs=1e-6)


def test_merging_keeps_each_image_once_in_order() -> None:
    one, two = np.zeros((1, 6)), np.ones((1, 6))
    merged = merge([{4: one, 0: one}, {4: two, 2: two}])
    assert list(merged) == [0, 2, 4]
    assert merged[4] is one


def test_what_is_remarked_is_ap_by_size_and_where_there_is_nothing_to_find(real: Annotations) -> None:
    evaluator = CocoEvaluator(real)
    assert evaluator.remarks() == []
    for batch, rows in published_batches(real, ratio=1.0, pad=0.0):
        evaluator.add(batch, [rows])
    metrics = evaluator.result([evaluator.partial()])
    (line,) = evaluator.remarks()
    assert line == f"AP by size: small {metrics['APs']:.4g}  medium {metrics['APm']:.4g}  large {metrics['APl']:.4g}"
    assert set(CocoEvaluator.headline) <= set(CocoEvaluator.metrics) <= set(metrics)
    large = read_content(
        {
            "images": [{"id": 1, "file_name": "a.jpg", "width": 300, "height": 300}],
            "categories": [{"id": 1, "name": "a"}],
            "annotations": [
                {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 200, 200], "area": 40000, "iscrowd": 0}
            ],
        },
        folder=Path("x"),
        file=TRUTH,
    )
    evaluator = CocoEvaluator(large)
    evaluator.result([evaluator.partial()])
    assert evaluator.remarks() == [
        "AP by size: large 0  no small objects  no medium objects",
        "no box was predicted in any image: early in training that is usual; later, look at the learning rate, the labels "
        "(`mtrain data check`) and where model.weights comes from",
    ]


def test_evaluation_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    evaluate_files(TRUTH, FOUND)
    assert capfd.readouterr() == ("", "")


def split_of(boxes: dict[int, list[list[float]]], *, crowd: bool = False) -> Annotations:
    """Images of 1000 x 1000 px by id, in turned order of their ids, with boxes xywh of one class."""
    names = {image: f"{place}.jpg" for place, image in enumerate(sorted(boxes, reverse=True))}
    rows = [(image, box) for image, found in boxes.items() for box in found]
    content = {
        "images": [{"id": i, "file_name": names[i], "width": 1000, "height": 1000} for i in boxes],
        "annotations": [
            {"id": n, "image_id": i, "category_id": 1, "bbox": box, "area": box[2] * box[3], "iscrowd": int(crowd)}
            for n, (i, box) in enumerate(rows, start=1)
        ],
        "categories": [{"id": 1, "name": "a"}],
    }
    return read_content(content, folder=Path("x"), file=Path("x.json"))


def test_perfect_predictions_of_a_crowded_image_score_one_where_enough_of_them_count() -> None:
    annotations = split_of({1: [[30.0 * (i % 30), 30.0 * (i // 30), 20, 20] for i in range(250)]})
    truth = annotations.samples[0].boxes
    scores = np.linspace(0.9, 0.5, len(truth))[:, None]
    perfect = {0: np.concatenate([truth, scores, np.zeros((len(truth), 1))], axis=1).astype(float)}
    capped = CocoEvaluator(annotations).result([perfect])
    assert 0.3 < capped["AP"] < 0.5
    sentence = warn_of_crowds(annotations, 100)
    assert sentence is not None
    assert sentence.startswith("1 images have more than 100 boxes (up to 250), but AP counts the best 100 predictions")
    assert "raise evaluate.max_detections to 250" in sentence
    assert warn_of_crowds(annotations, 250) is None
    whole = CocoEvaluator(annotations, max_detections=250).result([perfect])
    assert whole["AP"] == pytest.approx(1.0)
    for name, share in (("AR10", 0.04), ("AR100", 0.4)):
        assert whole[name] == capped[name] == pytest.approx(share)


def test_more_predictions_change_no_metric_of_images_that_are_not_crowded(real: Annotations) -> None:
    actual = {i: rows for i, (_, rows) in enumerate(published_batches(real, ratio=1.0, pad=0.0))}
    assert CocoEvaluator(real, max_detections=300).result([actual]) == CocoEvaluator(real).result([actual])


@pytest.mark.parametrize("crowd", [False, True])
def test_a_split_without_boxes_is_not_scored_and_says_so(crowd: bool) -> None:
    annotations = split_of({1: [[10, 10, 50, 50]] if crowd else [], 2: []}, crowd=crowd)
    evaluator = CocoEvaluator(annotations)
    assert evaluator.result([{0: np.array([[0, 0, 5, 5, 0.9, 0]])}]) == {}
    assert evaluator.remarks() == ["no boxes in the evaluation split: there is nothing to score"]


@pytest.mark.parametrize(("right", "expected"), [(7, 1.0), (12, 0.5)])
def test_of_equal_scores_the_image_with_the_lower_id_counts_first(right: int, expected: float) -> None:
    """As pycocotools ranks them; the order of file names, which is the order of samples, is the other way round."""
    annotations = split_of({7: [], 12: []} | {right: [[100, 100, 50, 50]]})
    assert [sample.image_id for sample in annotations.samples] == [12, 7]
    hit = np.array([[100, 100, 150, 150, 0.5, 0.0]])
    assert CocoEvaluator(annotations).result([{0: hit}, {1: hit}])["AP"] == pytest.approx(expected)


@pytest.mark.parametrize(("right_first", "expected"), [(True, 1.0), (False, 0.5)])
def test_of_equal_scores_in_an_image_the_first_one_counts_first(right_first: bool, expected: float) -> None:
    annotations = split_of({1: [[100, 100, 50, 50]]})
    rows = np.array([[100, 100, 150, 150, 0.5, 0.0], [700, 700, 750, 750, 0.5, 0.0]])
    actual = rows if right_first else rows[::-1]
    assert CocoEvaluator(annotations).result([{0: actual}])["AP"] == pytest.approx(expected)


def many_guesses(count: int, *, seed: int) -> np.ndarray:
    """``count`` boxes of one class around one corner, best first, with only seven different scores."""
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 20, (count, 2))
    scores = np.sort(rng.integers(1, 8, count))[::-1] / 8
    return np.column_stack([low, low + rng.uniform(30, 60, (count, 2)), scores, np.zeros(count)])


@pytest.mark.parametrize("limit", [100, 150])
def test_predictions_beyond_the_counted_ones_of_a_class_change_no_metric(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotations = split_of({1: [[5, 5, 40, 40], [50, 5, 20, 40]], 2: [[10, 10, 45, 45]]})
    batch = {"index": np.arange(2), "scale_pad": np.array([[1, 1, 0, 0]] * 2)}

    def metrics() -> dict[str, float]:
        evaluator = CocoEvaluator(annotations, max_detections=limit)
        evaluator.add(batch, [many_guesses(700, seed=1), many_guesses(400, seed=2)])
        return evaluator.result([evaluator.partial()])

    fewer = metrics()
    monkeypatch.setattr("mtrain.tasks.detection.evaluator.best_of_classes", lambda detections, count: detections)
    assert fewer == metrics()
    assert 0 < fewer["AP50"] < 1


def test_the_best_of_each_class_keep_their_order_and_of_equal_scores_the_first() -> None:
    rows = np.zeros((6, 6))
    rows[:, 0], rows[:, 4], rows[:, 5] = range(6), [0.9, 0.8, 0.8, 0.8, 0.3, 0.1], [1, 0, 1, 1, 0, 0]
    assert best_of_classes(rows, 2)[:, 0].tolist() == [0, 1, 2, 4]
    assert best_of_classes(rows, 1)[:, 0].tolist() == [0, 1]
