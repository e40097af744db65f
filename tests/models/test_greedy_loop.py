"""The compiled loop of suppression is numpy's to the last bit, and one that is wrong is not used."""

import numpy as np
import pytest

from mtrain.models.common import nms
from mtrain.models.common.nms import suppress
from tests.backends.compiler import needs_a_compiler
from tests.models.test_nms import crowd
from tests.selection import under_torch

pytestmark = [under_torch, needs_a_compiler]


@pytest.fixture(autouse=True)
def _there_is_a_loop() -> None:
    """Without one numpy would be compared with itself."""
    assert nms.load_greedy() is not None


@pytest.mark.parametrize("seed", range(12))
def test_the_compiled_loop_keeps_the_boxes_of_numpy_to_the_last_bit(seed, monkeypatch):
    """Whole corners make overlaps that are equal to the threshold; some boxes are turned over, endless or no numbers."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 1500))
    boxes, scores = np.round(crowd(rng, count, spread=60) / 8) * 8, np.round(rng.random(count), 2)
    odd = rng.choice(count, count // 10, replace=False)
    boxes[odd] = boxes[odd][:, [2, 1, 0, 3]]
    boxes[rng.choice(count, count // 20), rng.integers(0, 4, count // 20)] = rng.choice([np.nan, np.inf, -np.inf])
    classes = rng.integers(0, 3, count)
    for threshold in (0.0, 0.5, float(rng.random()), 1.0):
        for limit in (0, 7, 300, 10_000):
            settings = {"iou_threshold": threshold, "max_kept": limit}
            with np.errstate(invalid="ignore"), monkeypatch.context() as context:
                compiled = suppress(boxes, scores, classes, **settings)
                context.setattr(nms, "load_greedy", lambda: None)
                assert compiled.tolist() == suppress(boxes, scores, classes, **settings).tolist()


def test_a_box_at_the_threshold_falls_or_stays_as_in_numpy(monkeypatch):
    """Pairs whose overlap in float32 is the threshold: one other rounding decides otherwise."""
    rng, decided = np.random.default_rng(0), []
    for _ in range(400):
        boxes = crowd(rng, 2, spread=30).astype(np.float32)
        (x1, y1, x2, y2), areas = boxes.T, (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        shared = (x2.min() - x1.max()) * (y2.min() - y1.max())
        settings = {"iou_threshold": float(shared / (areas.sum() - shared)), "max_kept": 9}
        with monkeypatch.context() as context:
            compiled = suppress(boxes, np.array([0.9, 0.8]), **settings).tolist()
            context.setattr(nms, "load_greedy", lambda: None)
            assert compiled == suppress(boxes, np.array([0.9, 0.8]), **settings).tolist()
        decided.append(len(compiled))
    assert 20 < decided.count(1) < 380


def test_a_loop_that_is_wrong_is_not_used(tmp_path, monkeypatch):
    wrong = tmp_path / "greedy.c"
    wrong.write_text(nms.SOURCE.read_text().replace("& (classes[j] == group)", ""))
    monkeypatch.setattr(nms, "SOURCE", wrong)
    assert nms.load_greedy.__wrapped__() is None
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert nms.load_greedy.__wrapped__() is None
