"""Differentiable overlaps of boxes. The last axis of boxes has length 4; N stands for any leading axes."""

import math

from mtrain.core import ops
from mtrain.core.interfaces import Tensor


def complete_iou_N(boxes_N4: Tensor, targets_N4: Tensor, *, eps: float = 1e-7) -> Tensor:
    """Compute the complete IoU of pairs of boxes ``[xc, yc, w, h]`` in one unit: 1 when equal, down to about -1.5.

    It is the IoU, minus the squared distance of the centres over the squared diagonal of the hull, minus alpha times
    the squared difference of the angles of the diagonals. Alpha carries no gradient. Zheng et al. 2020, Distance-IoU
    Loss, equations 7 to 11.
    """
    xy1, wh1 = boxes_N4[..., :2], boxes_N4[..., 2:]
    xy2, wh2 = targets_N4[..., :2], targets_N4[..., 2:]
    half1, half2 = wh1 / 2, wh2 / 2
    low1, high1, low2, high2 = xy1 - half1, xy1 + half1, xy2 - half2, xy2 + half2
    overlap = ops.clip(ops.minimum(high1, high2) - ops.maximum(low1, low2), 0)
    inter = overlap[..., 0] * overlap[..., 1]
    union = wh1[..., 0] * wh1[..., 1] + wh2[..., 0] * wh2[..., 1] - inter + eps
    iou = inter / union
    hull = ops.square(ops.maximum(high1, high2) - ops.minimum(low1, low2))
    diagonal = hull[..., 0] + hull[..., 1] + eps
    between = ops.square(xy2 - xy1)
    distance = between[..., 0] + between[..., 1]
    angle = ops.atan(wh2[..., 0] / wh2[..., 1]) - ops.atan(wh1[..., 0] / wh1[..., 1])
    shape_term = (4 / math.pi**2) * ops.square(angle)
    # Alpha weighs a term and is not minimised itself, so it carries no gradient.
    alpha = ops.detach(shape_term / (shape_term - iou + (1 + eps)))
    return iou - (distance / diagonal + shape_term * alpha)


def overlap_N(boxes_N4: Tensor, targets_N4: Tensor, *, eps: float) -> Tensor:
    """Compute intersection / (union + ``eps``) of boxes ``[x1, y1, x2, y2]`` in one unit; leading axes broadcast."""
    inter, union = _intersection_and_union(boxes_N4, targets_N4, eps)
    return inter / union


def generalised_iou_N(boxes_N4: Tensor, targets_N4: Tensor, *, eps: float) -> Tensor:
    """Compute the generalised IoU of boxes ``[x1, y1, x2, y2]`` in one unit, in -1..1.

    It is the IoU minus the share of the hull that lies outside the union; ``eps`` is added to union and hull.
    Rezatofighi et al. 2019, Generalized Intersection over Union, algorithm 1.
    """
    inter, union = _intersection_and_union(boxes_N4, targets_N4, eps)
    low = ops.minimum(boxes_N4[..., :2], targets_N4[..., :2])
    high = ops.maximum(boxes_N4[..., 2:], targets_N4[..., 2:])
    sides = high - low
    hull = sides[..., 0] * sides[..., 1] + eps
    return inter / union - (hull - union) / hull


def _intersection_and_union(boxes_N4: Tensor, targets_N4: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = ops.minimum(boxes_N4[..., 2], targets_N4[..., 2]) - ops.maximum(boxes_N4[..., 0], targets_N4[..., 0])
    height = ops.minimum(boxes_N4[..., 3], targets_N4[..., 3]) - ops.maximum(boxes_N4[..., 1], targets_N4[..., 1])
    inter = ops.clip(width, 0) * ops.clip(height, 0)
    return inter, _area(boxes_N4) + _area(targets_N4) - inter + eps


def _area(boxes_N4: Tensor) -> Tensor:
    return (boxes_N4[..., 2] - boxes_N4[..., 0]) * (boxes_N4[..., 3] - boxes_N4[..., 1])
