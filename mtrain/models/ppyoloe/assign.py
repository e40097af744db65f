"""Which point of a dense detector answers for which object. Import it only where a framework is bound.

Both assigners see all pictures and objects of a micro batch at once, in shapes that do not depend on values, and give
the same answer on every framework: where values are equal, the earlier point or object counts.
Shape letters: B batch, N objects of a picture (padded), T objects of the micro batch, L points of all levels, C classes.
Boxes are ``[x1, y1, x2, y2]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtrain.core import ops
from mtrain.core.interfaces import Array, Tensor
from mtrain.models.common.boxes import overlap_N

_CELL_SIDE = 5.0
"""Side of a point's anchor box, in strides."""
_NEAREST = 9
"""Candidates of an object on each level: ATSS, section 4.3."""
_BEST = 13
"""Candidates of an object: TOOD, section 4.1."""
_INSIDE_PX = 1e-9
"""A point is inside a box when it is farther than this from every side."""
_ANCHOR_EPS, _PREDICTION_EPS = 1e-10, 1e-9
"""Of the IoU of objects with anchor boxes and with predicted boxes, as published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Centres of the cells of all levels."""

    sizes: Sequence[int]
    """Points of each level."""
    xy_L2: Tensor
    """Pixels."""
    stride_L1: Tensor
    """Pixels."""

    def anchors_L4(self) -> Tensor:
        """A square around each point, in pixels."""
        half_L1 = self.stride_L1 * (_CELL_SIDE / 2)
        return ops.concat((self.xy_L2 - half_L1, self.xy_L2 + half_L1), axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """The objects of a micro batch. Rows beyond a picture's objects hold a box of zeros, which no point is inside of; N >= 1."""

    labels_BN: Tensor
    """int64."""
    boxes_BN4: Tensor
    """Pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What each point answers for. No gradient."""

    positive_BL: Tensor
    """bool: the point answers for an object."""
    labels_BL: Tensor
    """int64, of the object; of the picture's first row where not positive."""
    boxes_BL4: Tensor
    """Of the object, in pixels; of the picture's first row where not positive."""
    quality_BL: Tensor
    """Wanted score of the label in 0..1; 0 where not positive."""


def points_of(sizes: Sequence[tuple[int, ...]], strides: Sequence[int], *, like: Tensor) -> Points:
    """Cell centres by (level, y, x), for levels of ``sizes`` (height, width) in cells."""
    xy, stride = [], []
    for (height, width), step in zip(sizes, strides, strict=True):
        y_HW, x_HW = np.mgrid[:height, :width]
        xy.append((np.stack((x_HW, y_HW), axis=2).reshape(-1, 2) + 0.5) * step)
        stride.append(np.full((height * width, 1), float(step)))
    return Points(
        sizes=[height * width for height, width in sizes],
        xy_L2=ops.asarray(np.concatenate(xy), like=like),
        stride_L1=ops.asarray(np.concatenate(stride), like=like),
    )


def truth_of(targets_T6: Array, *, shape: tuple[int, ...], like: Tensor) -> Truth:
    """Rows ``[image, class, xc, yc, w, h]``, boxes as shares of the picture, by picture and in pixels.

    Args:
        targets_T6: on the host.
        shape: (B, height, width) of the pictures.
    """
    batch, height, width = shape
    image_T = targets_T6[:, 0].astype(np.int64)
    order_T = np.argsort(image_T, kind="stable")
    image_T = image_T[order_T]
    counts_B = np.bincount(image_T, minlength=batch)
    row_T = np.arange(len(image_T)) - (np.cumsum(counts_B) - counts_B)[image_T]
    count = max(int(counts_B.max(initial=0)), 1)
    centre_T2, half_T2 = targets_T6[order_T, 2:4], targets_T6[order_T, 4:6] / 2
    sides = np.asarray((width, height), np.float32)
    labels_BN, boxes_BN4 = np.zeros((batch, count), np.int64), np.zeros((batch, count, 4), np.float32)
    labels_BN[image_T, row_T] = targets_T6[order_T, 1]
    boxes_BN4[image_T, row_T, :2] = (centre_T2 - half_T2) * sides
    boxes_BN4[image_T, row_T, 2:] = (centre_T2 + half_T2) * sides
    return Truth(
        labels_BN=ops.asarray(labels_BN, like=like, dtype="int64"),
        boxes_BN4=ops.asarray(boxes_BN4, like=like, dtype="float32"),
    )


def assign_static(truth: Truth, points: Points, predicted_BL4: Tensor) -> Assignment:
    """Adaptive training sample selection: Zhang et al. 2020, ATSS, algorithm 1.

    Candidates of an object are the nearest points of each level; those answer for it that are inside and whose anchor box
    overlaps it by more than mean + standard deviation of its candidates' IoU. The quality is the IoU of the predicted box.

    Args:
        predicted_BL4: pixels, without gradient.
    """
    boxes_BN14 = truth.boxes_BN4[:, :, None]
    overlap_BNL = overlap_N(boxes_BN14, points.anchors_L4()[None, None], eps=_ANCHOR_EPS)
    centre_BN12 = (boxes_BN14[..., :2] + boxes_BN14[..., 2:]) / 2
    offset_BNL2 = points.xy_L2[None, None] - centre_BN12
    distance_BNL = ops.square(offset_BNL2[..., 0]) + ops.square(offset_BNL2[..., 1])
    per_level = [min(_NEAREST, size) for size in points.sizes]
    levels = zip(ops.split(distance_BNL, points.sizes, axis=2), per_level, strict=True)
    candidate_BNL = ops.concat([largest(-distance, k) for distance, k in levels], axis=2)

    weight_BNL = ops.astype(candidate_BNL, ops.dtype(overlap_BNL))
    count = sum(per_level)
    mean_BN1 = ops.sum(overlap_BNL * weight_BNL, axis=2, keepdims=True) / count
    squares_BNL = ops.square(overlap_BNL - mean_BN1) * weight_BNL
    deviation_BN1 = ops.sqrt(ops.sum(squares_BNL, axis=2, keepdims=True) / (count - 1))
    chosen_BNL = candidate_BNL & (overlap_BNL > mean_BN1 + deviation_BN1) & _inside(points, truth)

    owner_BL, positive_BL = _owners(chosen_BNL, overlap_BNL)
    labels_BL, boxes_BL4 = _of_owner(truth, owner_BL)
    quality_BL = overlap_N(boxes_BL4, predicted_BL4, eps=_PREDICTION_EPS)
    return Assignment(
        positive_BL=positive_BL,
        labels_BL=labels_BL,
        boxes_BL4=boxes_BL4,
        quality_BL=ops.where(positive_BL, quality_BL, 0.0),
    )


def assign_aligned(truth: Truth, points: Points, predicted_BL4: Tensor, logits_BLC: Tensor) -> Assignment:
    """Task-aligned assignment: Feng et al. 2021, TOOD, section 3.2, with alpha 1 and beta 6.

    Alignment is score of the object's label times IoU ** 6. Of the points inside, the best aligned ones answer for the object. The
    quality is the alignment, scaled so that an object's best one has its largest IoU.

    Args:
        predicted_BL4: pixels, without gradient.
        logits_BLC: without gradient.
    """
    overlap_BNL = overlap_N(truth.boxes_BN4[:, :, None], predicted_BL4[:, None], eps=_PREDICTION_EPS)
    batch, count = ops.shape(truth.labels_BN)
    label_BLN = ops.broadcast_to(truth.labels_BN[:, None], (batch, ops.shape(logits_BLC)[1], count))
    own_BLN = ops.take_along_axis(logits_BLC, label_BLN, 2)
    cube_BNL = overlap_BNL * overlap_BNL * overlap_BNL
    alignment_BNL = ops.permute_dims(ops.sigmoid(own_BLN), (0, 2, 1)) * ops.square(cube_BNL)
    inside_BNL = _inside(points, truth)
    inner_BNL = ops.where(inside_BNL, alignment_BNL, 0.0)
    chosen_BNL = largest(inner_BNL, min(_BEST, sum(points.sizes))) & inside_BNL

    owner_BL, positive_BL = _owners(chosen_BNL, overlap_BNL)
    rows_N1 = ops.arange(0, count, like=owner_BL)[:, None]
    mine_BNL = (owner_BL[:, None] == rows_N1) & positive_BL[:, None]
    best_BN1 = ops.max(ops.where(mine_BNL, alignment_BNL, 0.0), axis=2, keepdims=True)
    top_BN1 = ops.max(ops.where(mine_BNL, overlap_BNL, 0.0), axis=2, keepdims=True)
    scaled_BNL = alignment_BNL / (best_BN1 + 1e-9) * top_BN1
    quality_BL = ops.max(ops.where(mine_BNL, scaled_BNL, 0.0), axis=1)
    labels_BL, boxes_BL4 = _of_owner(truth, owner_BL)
    return Assignment(positive_BL=positive_BL, labels_BL=labels_BL, boxes_BL4=boxes_BL4, quality_BL=quality_BL)


def largest(x_ML: Tensor, k: int) -> Tensor:
    """bool (..., L): the ``k`` largest of each row, just ``k`` of them; of equal ones the earlier."""
    least_M1 = ops.topk(x_ML, k, -1)[0][..., k - 1 :]
    above_ML = x_ML > least_M1
    equal_ML = (x_ML >= least_M1) & ~above_ML  # not ==, which Paddle before 3 rounds to 1e-8
    places_M1 = k - ops.sum(above_ML, axis=-1, keepdims=True)
    return above_ML | (equal_ML & (ops.cumulative_sum(ops.astype(equal_ML, "int64"), axis=-1) <= places_M1))


def _inside(points: Points, truth: Truth) -> Tensor:
    """bool (B, N, L)."""
    x_L, y_L = points.xy_L2[:, 0], points.xy_L2[:, 1]
    x1, y1, x2, y2 = (truth.boxes_BN4[:, :, i : i + 1] for i in range(4))
    horizontal = ops.minimum(x_L - x1, x2 - x_L)
    return ops.minimum(horizontal, ops.minimum(y_L - y1, y2 - y_L)) > _INSIDE_PX


def _owners(chosen_BNL: Tensor, overlap_BNL: Tensor) -> tuple[Tensor, Tensor]:
    """The row of the object that each point answers for (B, L), and whether it answers for any (B, L).

    A point that several objects chose goes to the one it overlaps most, of all objects of the picture.
    """
    votes_BNL = ops.astype(chosen_BNL, "int64")
    count_BL = ops.sum(votes_BNL, axis=1)
    contested_BL = count_BL > 1
    owner_BL = ops.where(contested_BL, ops.argmax(overlap_BNL, axis=1), ops.argmax(votes_BNL, axis=1))
    return owner_BL, count_BL > 0


def _of_owner(truth: Truth, owner_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Label (B, L) and box (B, L, 4) of the object in each row ``owner_BL``."""
    labels_BL = ops.take_along_axis(truth.labels_BN, owner_BL, 1)
    batch, count = ops.shape(owner_BL)
    rows_BL4 = ops.broadcast_to(owner_BL[:, :, None], (batch, count, 4))
    return labels_BL, ops.take_along_axis(truth.boxes_BN4, rows_BL4, 1)
