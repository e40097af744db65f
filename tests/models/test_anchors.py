"""How anchors are judged and found."""

import numpy as np
import pytest

from mtrain.models.yolov5 import anchors
from tests.selection import under_torch

pytestmark = under_torch


def test_fit_is_the_worse_ratio_of_the_sides():
    boxes, sizes = np.asarray([[10.0, 20], [40, 20]]), np.asarray([[20.0, 20], [10, 5]])
    np.testing.assert_allclose(anchors.fit_NK(boxes, sizes), [[0.5, 0.25], [0.5, 0.25]])
    assert anchors.recall(boxes, sizes, threshold=2.5) == 1
    assert anchors.recall(boxes, sizes, threshold=1.9) == 0
    assert anchors.fitness(boxes, sizes, threshold=2.5) == 0.5


def test_k_means_finds_separate_clusters():
    rng = np.random.default_rng(0)
    middles = np.asarray([[0.0, 0], [10, 0], [0, 10]])
    points = np.repeat(middles, 40, axis=0) + rng.normal(0, 0.1, (120, 2))
    actual = anchors.k_means(points, 3, rng=rng)
    distance = np.linalg.norm(actual[:, None] - middles, axis=2)
    assert (distance.min(axis=0) < 0.1).all()


def test_k_means_survives_points_that_are_all_the_same():
    assert anchors.k_means(np.ones((20, 2)), 3, rng=np.random.default_rng(0)).shape == (3, 2)


def test_evolution_never_loses_fitness():
    rng = np.random.default_rng(0)
    boxes = rng.uniform(4, 200, (300, 2))
    start = rng.uniform(4, 200, (9, 2))
    actual = anchors.evolve(boxes, start, threshold=4.0, rng=rng, generations=200)
    assert anchors.fitness(boxes, actual, threshold=4.0) > anchors.fitness(boxes, start, threshold=4.0)


def test_too_few_boxes_are_named():
    with pytest.raises(ValueError, match="2 boxes of at least 2 px, 9 are needed"):
        anchors.compute(np.asarray([[3.0, 3], [4, 4], [1, 1]]), levels=3, per_level=3, threshold=4.0, seed=0)


def test_very_many_boxes_take_little_time_and_fit():
    boxes = np.random.default_rng(0).lognormal(3, 0.8, (100_000, 2)).clip(2.5, 600)
    actual = anchors.compute(boxes, levels=3, per_level=3, threshold=4.0, seed=0)
    assert anchors.recall(boxes, actual.reshape(-1, 2), threshold=4.0) > 0.98
