"""Assign the points of a dense detector to the objects for which they are responsible.

Import it only where a framework is bound. Both assigners process all images and objects of a micro batch at once, in
shapes that do not depend on values. They give the same result on every framework: of equal values, the earlier point or
object wins. Shape letters: B batch, N objects of an image (padded), T objects of the micro batch, L points of all
levels, C classes. Boxes are ``[x1, y1, x2, y2]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.core import ops
from mtrain.core.interfaces import Array, Tensor
from mtrain.models.common.boxes import overlap_N
from mtrain.models.ppyoloe.truth import group_rows

_CELL_SIDE = 5.0
"""Side of a point's anchor box, in strides."""
_NEAREST = 9
"""Number of candidates of an object on each level: ATSS, section 4.3."""
_BEST = 13
"""Number of candidates of an object: TOOD, section 4.1."""
_INSIDE_PX = 1e-9
"""A point is inside a box if its distance from every side is larger than this."""
_ANCHOR_EPS, _PREDICTION_EPS = 1e-10, 1e-9
"""Epsilon in the IoU of objects with anchor boxes and with predicted boxes, as published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """The points of all levels, which are the centres of the cells."""

    sizes: Sequence[int]
    """Number of points of each level."""
    xy_L2: Tensor
    """Pixels."""
    stride_L1: Tensor
    """Pixels."""

    def anchors_L4(self) -> Tensor:
        """Return the anchor box of each point, a square around it, in pixels."""
        half_L1 = self.stride_L1 * (_CELL_SIDE / 2)
        return ops.concat((self.xy_L2 - half_L1, self.xy_L2 + half_L1), axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """The objects of a micro batch, padded to N >= 1 rows per image with boxes of zeros, which contain no point."""

    labels_BN: Tensor
    """int64."""
    boxes_BN4: Tensor
    """Pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The object for which each point is responsible, if any. Carries no gradient."""

    positive_BL: Tensor
    """bool: whether the point is responsible for an object."""
    labels_BL: Tensor
    """int64: label of the object; where not positive, that of the image's first row."""
    boxes_BL4: Tensor
    """Box of the object in pixels; where not positive, that of the image's first row."""
    quality_BL: Tensor
    """Target score of the label in 0..1; 0 where not positive."""


def points_of(sizes: Sequence[tuple[int, ...]], strides: Sequence[int], *, like: Tensor) -> Points:
    """Make the points of levels with ``sizes`` (height, width) in cells, ordered by (level, y, x)."""
    xy, stride = [], []
    for (height, width), step in zip(sizes, strides, strict=True):
        x_W, y_H = ops.arange(0, width, like=like), ops.arange(0, height, like=like)
        grid_HW2 = ops.stack(ops.meshgrid(x_W, y_H, indexing="xy"), axis=2)
        xy.append((ops.reshape(grid_HW2, (height * width, 2)) + 0.5) * step)
        stride.append(ops.full((height * width, 1), float(step), like=like))
    return Points(
        sizes=[height * width for height, width in sizes],
        xy_L2=ops.concat(xy),
        stride_L1=ops.concat(stride),
    )


def truth_of(targets_T6: Array, *, shape: tuple[int, ...], like: Tensor) -> Truth:
    """Do what ``grouped`` does, and send the result to the device of ``like``."""
    labels_BN, boxes_BN4 = group_rows(targets_T6, shape=shape)
    return Truth(
        labels_BN=ops.asarray(labels_BN, like=like, dtype="int64"),
        boxes_BN4=ops.asarray(boxes_BN4, like=like, dtype="float32"),
    )


def assign_static(truth: Truth, points: Points, predicted_BL4: Tensor) -> Assignment:
    """Assign by adaptive training sample selection: Zhang et al. 2020, ATSS, algorithm 1.

    The candidates of an object are the nearest points of each level. Those are assigned that lie inside the object and
    whose anchor box overlaps it by more than mean + standard deviation of its candidates' IoU. The quality is the IoU
    of the predicted box.

    Everything about labels is decided in float32, whatever the precision of the predictions: else a point at a threshold would
    be assigned otherwise in a float64 job.

    Args:
        truth: Objects of the micro batch, in float32.
        points: Points of all levels.
        predicted_BL4: Predicted boxes in pixels, without gradient.
    """
    points = Points(
        sizes=points.sizes, xy_L2=ops.astype(points.xy_L2, "float32"), stride_L1=ops.astype(points.stride_L1, "float32")
    )
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
    boxes_BL4 = ops.astype(boxes_BL4, ops.dtype(predicted_BL4))
    quality_BL = overlap_N(boxes_BL4, predicted_BL4, eps=_PREDICTION_EPS)
    return Assignment(
        positive_BL=positive_BL,
        labels_BL=labels_BL,
        boxes_BL4=boxes_BL4,
        quality_BL=ops.where(positive_BL, quality_BL, 0.0),
    )


def assign_aligned(truth: Truth, points: Points, predicted_BL4: Tensor, logits_BLC: Tensor) -> Assignment:
    """Assign by task alignment: Feng et al. 2021, TOOD, section 3.2, with alpha 1 and beta 6.

    The alignment of a point is its score for the object's label times IoU ** 6. Of the points inside an object, the
    best aligned ones are assigned. The quality is the alignment, scaled so that an object's best point has the object's
    largest IoU.

    Args:
        truth: Objects of the micro batch.
        points: Points of all levels.
        predicted_BL4: Predicted boxes in pixels, without gradient.
        logits_BLC: Class logits, without gradient.
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
    """Return bool (..., L) that marks exactly the ``k`` largest elements of each row; of equal ones, the earlier."""
    least_M1 = ops.topk(x_ML, k, -1)[0][..., k - 1 :]
    above_ML = x_ML > least_M1
    equal_ML = (x_ML >= least_M1) & ~above_ML  # not ==, which Paddle before 3 rounds to 1e-8
    places_M1 = k - ops.sum(above_ML, axis=-1, keepdims=True)
    return above_ML | (equal_ML & (ops.cumulative_sum(ops.astype(equal_ML, "int64"), axis=-1) <= places_M1))


def _inside(points: Points, truth: Truth) -> Tensor:
    """Return bool (B, N, L): whether each point lies inside each object."""
    x_L, y_L = points.xy_L2[:, 0], points.xy_L2[:, 1]
    x1, y1, x2, y2 = (truth.boxes_BN4[:, :, i : i + 1] for i in range(4))
    horizontal = ops.minimum(x_L - x1, x2 - x_L)
    return ops.minimum(horizontal, ops.minimum(y_L - y1, y2 - y_L)) > _INSIDE_PX


def _owners(chosen_BNL: Tensor, overlap_BNL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of the object to which each point is assigned (B, L), and whether it is assigned to any (B, L).

    A point that several objects chose is assigned to the object of the image that it overlaps most, even if that
    object did not choose it.
    """
    votes_BNL = ops.astype(chosen_BNL, "int64")
    count_BL = ops.sum(votes_BNL, axis=1)
    contested_BL = count_BL > 1
    owner_BL = ops.where(contested_BL, ops.argmax(overlap_BNL, axis=1), ops.argmax(votes_BNL, axis=1))
    return owner_BL, count_BL > 0


def _of_owner(truth: Truth, owner_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return label (B, L) and box (B, L, 4) of the object in row ``owner_BL`` of each point's image."""
    labels_BL = ops.take_along_axis(truth.labels_BN, owner_BL, 1)
    batch, count = ops.shape(owner_BL)
    rows_BL4 = ops.broadcast_to(owner_BL[:, :, None], (batch, count, 4))
    return labels_BL, ops.take_along_axis(truth.boxes_BN4, rows_BL4, 1)
