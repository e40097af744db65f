"""PP-YOLOE's decoding and losses. Import it only where a framework is bound.

Shape letters: B batch, L points of all levels, C classes, S sides of a box (left, top, right, bottom), K bins of a
distance.
"""

from dataclasses import dataclass

from mtrain.core import nn, ops
from mtrain.core.interfaces import Collective, Tensor
from mtrain.models.common.boxes import generalised_iou_N
from mtrain.models.common.losses import varifocal_sum
from mtrain.models.ppyoloe.assign import Assignment, Points, Truth, assign_aligned, assign_static

_IOU_EPS = 1e-10
_LAST_GAP = 0.01
"""Target distances are clipped this far before the last bin, so that they have a bin on both sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Settings of the loss."""

    class_count: int
    static_assigner_epoch: int
    """Epochs before this one assign statically (ATSS), later ones by task alignment."""
    cls: float
    iou: float
    dfl: float
    """``cls``, ``iou`` and ``dfl`` are the gains of the three losses in ``total``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """The head's outputs for each point."""

    logits_BLC: Tensor
    """Class logits."""
    distances_BLSK: Tensor
    """Logits of the bins of each distance."""
    bins_K: Tensor
    """Distance of each bin, in strides."""


def decode(outputs: Outputs, points: Points) -> tuple[Tensor, Tensor]:
    """Return boxes (B, L, 4) ``[x1, y1, x2, y2]`` in strides, and log probabilities of the bins (B, L, S, K).

    The distance of a side is the mean of its distribution over the bins: Li et al. 2020, Generalized Focal Loss,
    equation 5.
    """
    log_BLSK = ops.log_softmax(outputs.distances_BLSK, 3)
    distance_BLS = ops.sum(ops.exp(log_BLSK) * outputs.bins_K, axis=3)
    centre_L2 = points.xy_L2 / points.stride_L1
    boxes_BL4 = ops.concat((centre_L2 - distance_BLS[..., :2], centre_L2 + distance_BLS[..., 2:]), axis=2)
    return boxes_BL4, log_BLSK


def assign(boxes_BL4: Tensor, logits_BLC: Tensor, points: Points, truth: Truth, *, static: bool) -> Assignment:
    """Assign points to objects, without gradient.

    Args:
        boxes_BL4: Predicted boxes in strides.
        logits_BLC: Class logits.
        points: Points of all levels.
        truth: Objects of the micro batch.
        static: Assign by ATSS; otherwise by task alignment.
    """
    with nn.no_grad():
        predicted_BL4 = ops.detach(boxes_BL4) * points.stride_L1
        if static:
            return assign_static(truth, points, predicted_BL4)
        typed_truth = Truth(labels_BN=truth.labels_BN, boxes_BN4=ops.astype(truth.boxes_BN4, ops.dtype(boxes_BL4)))
        return assign_aligned(typed_truth, points, predicted_BL4, ops.detach(logits_BLC))


def loss(
    outputs: Outputs, points: Points, truth: Truth, *, static: bool, settings: LossSettings, collective: Collective
) -> dict[str, Tensor]:
    """Compute the losses; every rank must call equally often, because the normaliser is averaged over ranks.

    Sums are over positive points, weighted by their quality, and divided by the sum of qualities, which is averaged
    over ranks and at least 1. Xu et al. 2022, PP-YOLOE, equation 2, with the published normaliser.

    Returns: ``total``, which carries the gradient; ``cls``, ``iou`` and ``dfl``, detached and before their gains; and
        ``l1``, the mean absolute difference of box coordinates in strides, detached.
    """
    boxes_BL4, log_BLSK = decode(outputs, points)
    assignment = assign(boxes_BL4, outputs.logits_BLC, points, truth, static=static)
    # Over all ranks, so that their mean gradient is that of one rank with all samples; at least 1 where no object is
    # seen.
    normaliser = ops.clip(collective.all_reduce(ops.sum(assignment.quality_BL), "mean"), 1.0)
    target_BL4 = assignment.boxes_BL4 / points.stride_L1
    overlap_BL = generalised_iou_N(boxes_BL4, target_BL4, eps=_IOU_EPS)
    cls = (
        varifocal_sum(outputs.logits_BLC, assignment.labels_BL, assignment.quality_BL, assignment.positive_BL)
        / normaliser
    )
    iou = ops.sum((1 - overlap_BL) * assignment.quality_BL) / normaliser
    dfl = ops.sum(_distribution_loss(log_BLSK, target_BL4, points) * assignment.quality_BL) / normaliser
    total = settings.cls * cls + settings.iou * iou + settings.dfl * dfl
    with nn.no_grad():
        l1 = _mean_difference(ops.detach(boxes_BL4), target_BL4, assignment.positive_BL)
    return {"total": total, "cls": ops.detach(cls), "iou": ops.detach(iou), "dfl": ops.detach(dfl), "l1": l1}


def _distribution_loss(log_BLSK: Tensor, target_BL4: Tensor, points: Points) -> Tensor:
    """Compute the distribution focal loss of each point, (B, L): Li et al. 2020, Generalized Focal Loss, equation 6.

    It is the cross entropies of the two bins next to each target distance, weighted by nearness, averaged over the
    sides.
    """
    centre_L2 = points.xy_L2 / points.stride_L1
    distance_BLS = ops.concat((centre_L2 - target_BL4[..., :2], target_BL4[..., 2:] - centre_L2), axis=2)
    # Past the last bin there is no neighbour to take the other share.
    distance_BLS = ops.clip(distance_BLS, 0.0, ops.shape(log_BLSK)[3] - 1 - _LAST_GAP)
    below_BLS = ops.floor(distance_BLS)
    share_BLS = distance_BLS - below_BLS
    index_BLS = ops.astype(below_BLS, "int64")
    both_BLS2 = ops.take_along_axis(log_BLSK, ops.stack((index_BLS, index_BLS + 1), axis=3), 3)
    return -ops.mean(both_BLS2[..., 0] * (1 - share_BLS) + both_BLS2[..., 1] * share_BLS, axis=2)


def _mean_difference(boxes_BL4: Tensor, target_BL4: Tensor, positive_BL: Tensor) -> Tensor:
    """Compute the mean absolute difference of the coordinates of positive points; 0 if there is no positive point."""
    difference_BL = ops.mean(ops.abs(boxes_BL4 - target_BL4), axis=2)
    # Without positive points the sum is 0, and so is the mean.
    count = ops.clip(ops.astype(ops.sum(positive_BL), ops.dtype(boxes_BL4)), 1.0)
    return ops.sum(ops.where(positive_BL, difference_BL, 0.0)) / count
