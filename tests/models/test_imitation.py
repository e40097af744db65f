"""Imitation of a teacher: its losses against numpy, what it leaves alone, and that both frameworks compute the same."""

import importlib

import numpy as np
import pytest

from mtrain.core import ops
from mtrain.core.interfaces import Imitation


@pytest.fixture(autouse=True)
def imitation(framework):
    """The module, which needs a bound framework."""
    return importlib.import_module("mtrain.models.common.imitation")


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(4, 5), (3, 5, 2, 6)])
def test_classes_differ_by_the_divergence_of_the_softened_probabilities(framework, imitation, rng, shape):
    mine, theirs = 3 * rng.standard_normal((2, *shape))
    p, q = softmax(theirs / 2.5), softmax(mine / 2.5)
    expected = 2.5**2 * np.mean(np.sum(p * np.log(p / q), axis=1))
    found = imitation.class_loss(framework.tensor(mine), framework.tensor(theirs), 2.5)
    assert float(ops.to_numpy(found)) == pytest.approx(expected, rel=1e-12)


def boxes(rng, *shape: int) -> np.ndarray:
    corner = rng.uniform(0, 40, (*shape, 2))
    return np.concatenate((corner, corner + rng.uniform(4, 30, (*shape, 2))), -1)


def generalised_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    sides = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0, None)
    inter = sides.prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inter
    hull = (np.maximum(a[..., 2:], b[..., 2:]) - np.minimum(a[..., :2], b[..., :2])).prod(-1)
    return inter / union - (hull - union) / hull


def detections(framework, scores: np.ndarray, corners: np.ndarray):
    imitation = importlib.import_module("mtrain.models.common.imitation")
    return imitation.Detections(scores_BAMC=framework.tensor(scores), boxes_BAM4=framework.tensor(corners))


def expected_detection_loss(p: np.ndarray, t: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    highest = t.max(3)
    weight = np.where(highest >= 0.1, highest, 0)
    entropy = -(t * np.log(p) + (1 - t) * np.log(1 - p))
    sums = ((t - p) ** 2 * entropy).sum((1, 2, 3)) + (weight * (1 - generalised_iou(a, b))).sum((1, 2))
    return float(np.mean(sums / np.maximum(weight.sum((1, 2)), 1)))


def test_detections_differ_by_focused_scores_and_confident_boxes(framework, imitation, rng):
    p, t = rng.uniform(0.01, 0.99, (2, 3, 2, 7, 4))
    t *= rng.uniform(0, 1, (3, 2, 7, 1)) ** 4  # some cells are below the confidence that counts
    a, b = boxes(rng, 3, 2, 7), boxes(rng, 3, 2, 7)
    found = imitation.detection_loss(detections(framework, p, a), detections(framework, t, b))
    assert float(ops.to_numpy(found)) == pytest.approx(expected_detection_loss(p, t, a, b), rel=1e-7)


def test_a_network_with_several_boxes_of_a_cell_shows_its_best_to_one_with_a_single_one(framework, imitation, rng):
    p, t = rng.uniform(0.01, 0.99, (2, 3, 7, 4)), rng.uniform(0.01, 0.99, (2, 1, 7, 4))
    a, b = boxes(rng, 2, 3, 7), boxes(rng, 2, 1, 7)
    best = p.max(3).argmax(1)[:, None, :, None]
    expected = expected_detection_loss(np.take_along_axis(p, best, 1), t, np.take_along_axis(a, best, 1), b)
    found = imitation.detection_loss(detections(framework, p, a), detections(framework, t, b))
    assert float(ops.to_numpy(found)) == pytest.approx(expected, rel=1e-7)


def test_attention_is_compared_between_any_numbers_of_channels(framework, imitation, rng):
    mine, theirs = rng.standard_normal((2, 3, 4, 6)), rng.standard_normal((2, 8, 4, 6))
    q, p = ((x**2).sum(1) for x in (mine, theirs))
    q, p = (x / np.sqrt((x**2).sum((1, 2), keepdims=True)) for x in (q, p))
    found = imitation.attention_loss([framework.tensor(mine)] * 2, [framework.tensor(theirs)] * 2)
    assert float(ops.to_numpy(found)) == pytest.approx(2 * np.mean(((q - p) ** 2).sum((1, 2))), rel=1e-9)


def test_attention_of_another_size_is_resized(framework, imitation, rng):
    coarse = rng.uniform(1, 2, (2, 3, 4, 4))
    fine = np.repeat(np.repeat(coarse, 2, 2), 2, 3)
    near = imitation.attention_loss([framework.tensor(coarse)], [framework.tensor(fine)])
    far = imitation.attention_loss([framework.tensor(coarse)], [framework.tensor(fine[:, :, ::-1].copy())])
    assert float(ops.to_numpy(near)) < 1e-6 < float(ops.to_numpy(far))


def test_equal_networks_have_nothing_to_imitate(framework, imitation, rng):
    logits, maps = framework.tensor(rng.standard_normal((4, 5))), [framework.tensor(rng.standard_normal((4, 3, 6, 6)))]
    signals = imitation.Signals(logits=logits, maps=maps)
    found = imitation.imitation_loss(signals, signals, Imitation(teacher=None, features=1.0, temperature=3.0))
    assert abs(float(ops.to_numpy(found))) < 1e-12


def test_saturated_scores_have_finite_gradients(framework, imitation):
    logits = framework.variable(np.array([-200.0, 0.0, 200.0]).reshape(1, 1, 3, 1))
    corners = framework.tensor(np.tile([0.0, 0.0, 4.0, 4.0], (1, 1, 3, 1)))
    target = detections(
        framework, np.array([1.0, 0.0, 0.0]).reshape(1, 1, 3, 1), np.tile([0.0, 0.0, 4.0, 4.0], (1, 1, 3, 1))
    )
    mine = imitation.Detections(scores_BAMC=ops.sigmoid(logits), boxes_BAM4=corners)
    loss = imitation.detection_loss(mine, target)
    (gradient,) = framework.gradients(loss, [logits])
    assert np.isfinite(gradient).all()
    assert np.isfinite(ops.to_numpy(loss))
