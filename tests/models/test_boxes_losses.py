"""Overlaps and losses against formulas written out."""

import numpy as np
import pytest

from mtrain.core import ops
from mtrain.models.common.boxes import complete_iou_N
from mtrain.models.common.losses import focal_cross_entropy


@pytest.fixture
def overlap(framework):
    """Compute the overlap of two arrays of boxes."""
    return lambda boxes, others, **options: ops.to_numpy(
        complete_iou_N(framework.tensor(boxes), framework.tensor(others), **options)
    )


def test_equal_boxes_overlap_completely_and_far_ones_are_told_apart(overlap):
    box = np.asarray([[5.0, 5, 4, 2], [5, 5, 4, 2], [5, 5, 4, 2]])
    other = np.asarray([[5.0, 5, 4, 2], [15, 5, 4, 2], [105, 5, 4, 2]])
    near_1, near, far = overlap(box, other).tolist()
    assert near_1 == pytest.approx(1, abs=1e-6)
    assert near == pytest.approx(-(10**2) / (14**2 + 2**2))
    assert near > far > -1


def test_shape_term_is_that_of_the_paper(overlap):
    a, b = np.asarray([[0.0, 0, 2, 2]]), np.asarray([[0.0, 0, 4, 2]])
    v = 4 / np.pi**2 * (np.arctan(2) - np.arctan(1)) ** 2
    assert overlap(a, b, eps=0).item() == pytest.approx(0.5 - v * v / (1 - 0.5 + v))


def test_gradient_of_the_overlap_treats_alpha_as_a_constant(framework, overlap):
    box, target = np.asarray([[0.3, 0.1, 2, 1.5]]), np.asarray([[0.0, 0, 4, 2]])
    variable = framework.variable(box)
    grad = framework.gradients(ops.sum(complete_iou_N(variable, framework.tensor(target))), [variable])[0]
    step, slopes = 1e-6, []
    for i in range(4):
        moved = [box.copy() for _ in range(2)]
        moved[0][0, i] += step
        moved[1][0, i] -= step
        slopes.append((overlap(moved[0], target) - overlap(moved[1], target)).item() / (2 * step))
    np.testing.assert_allclose(grad[0, :2], slopes[:2], rtol=1e-6)
    assert not np.allclose(grad[0, 2:], slopes[2:], rtol=1e-3)


@pytest.mark.parametrize(("weight", "gamma"), [(1.0, 0.0), (2.0, 0.0), (1.0, 1.5), (3.0, 2.0), (1.0, 0.3)])
def test_focal_cross_entropy_is_the_formula(framework, weight, gamma):
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(6, 5)) * 3, rng.random((6, 5))
    p = 1 / (1 + np.exp(-x))
    expected = -(weight * t * np.log(p) + (1 - t) * np.log(1 - p))
    if gamma:
        expected *= (t * 0.25 + (1 - t) * 0.75) * (1 - (t * p + (1 - t) * (1 - p))) ** gamma
    actual = focal_cross_entropy(framework.tensor(x), framework.tensor(t), positive_weight=weight, gamma=gamma)
    np.testing.assert_allclose(ops.to_numpy(actual), expected, rtol=1e-10)
