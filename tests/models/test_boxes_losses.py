"""Overlaps and losses against formulas written out."""

import numpy as np
import pytest
import torch

from mtrain.models.boxes import complete_iou_N
from mtrain.models.losses import focal_cross_entropy


def test_equal_boxes_overlap_completely_and_far_ones_are_told_apart():
    box = torch.tensor([[5.0, 5, 4, 2], [5, 5, 4, 2], [5, 5, 4, 2]], dtype=torch.float64)
    other = torch.tensor([[5.0, 5, 4, 2], [15, 5, 4, 2], [105, 5, 4, 2]], dtype=torch.float64)
    near_1, near, far = complete_iou_N(box, other).tolist()
    assert near_1 == pytest.approx(1, abs=1e-6)
    assert near == pytest.approx(-(10**2) / (14**2 + 2**2))
    assert near > far > -1


def test_shape_term_is_that_of_the_paper():
    a, b = torch.tensor([[0.0, 0, 2, 2]], dtype=torch.float64), torch.tensor([[0.0, 0, 4, 2]], dtype=torch.float64)
    v = 4 / np.pi**2 * (np.arctan(2) - np.arctan(1)) ** 2
    assert complete_iou_N(a, b, eps=0).item() == pytest.approx(0.5 - v * v / (1 - 0.5 + v))


def test_gradient_of_the_overlap_treats_alpha_as_a_constant():
    box = torch.tensor([[0.3, 0.1, 2, 1.5]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0.0, 0, 4, 2]], dtype=torch.float64)
    complete_iou_N(box, target).sum().backward()
    step, slopes = 1e-6, []
    for i in range(4):
        moved = [box.detach().clone() for _ in range(2)]
        moved[0][0, i] += step
        moved[1][0, i] -= step
        slopes.append(float(complete_iou_N(moved[0], target) - complete_iou_N(moved[1], target)) / (2 * step))
    np.testing.assert_allclose(box.grad[0, :2], slopes[:2], rtol=1e-6)
    assert not np.allclose(box.grad[0, 2:], slopes[2:], rtol=1e-3)


@pytest.mark.parametrize(("weight", "gamma"), [(1.0, 0.0), (2.0, 0.0), (1.0, 1.5), (3.0, 2.0)])
def test_focal_cross_entropy_is_the_formula(weight, gamma):
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(6, 5)) * 3, rng.random((6, 5))
    p = 1 / (1 + np.exp(-x))
    expected = -(weight * t * np.log(p) + (1 - t) * np.log(1 - p))
    if gamma:
        expected *= (t * 0.25 + (1 - t) * 0.75) * (1 - (t * p + (1 - t) * (1 - p))) ** gamma
    found = focal_cross_entropy(torch.from_numpy(x), torch.from_numpy(t), positive_weight=weight, gamma=gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
