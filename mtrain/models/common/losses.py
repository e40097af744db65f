"""Losses element by element, any shape."""

from mtrain.core import ops
from mtrain.core.interfaces import Tensor


def focal_cross_entropy(
    logits: Tensor, targets: Tensor, *, positive_weight: float = 1.0, gamma: float = 0.0, alpha: float = 0.25
) -> Tensor:
    """Binary cross entropy with logits; with ``gamma`` > 0 times ``alpha_t * (1 - p_t) ** gamma``.

    ``p_t`` and ``alpha_t`` are linear between targets 0 and 1. Lin et al. 2017, Focal Loss, equation 5.
    """
    loss = ops.binary_cross_entropy_with_logits(logits, targets, positive_weight=positive_weight)
    if gamma == 0:
        return loss
    probability = ops.sigmoid(logits)
    missed = 1 - (targets * probability + (1 - targets) * (1 - probability))
    return loss * (targets * alpha + (1 - targets) * (1 - alpha)) * ops.pow(missed, gamma)


def varifocal_sum(logits_BLC: Tensor, labels_BL: Tensor, quality_BL: Tensor, positive_BL: Tensor) -> Tensor:
    """Varifocal loss, summed: a scalar. Zhang et al. 2021, VarifocalNet, equation 2, with alpha 0.75 and gamma 2.

    ``p = sigmoid(logits)``. The label of a positive has the target ``q``, its quality in 0..1, and the loss ``q * BCE(p, q)``; every
    other class of every point has ``0.75 * p ** 2 * BCE(p, 0)``. The gradient flows through the weight ``p ** 2`` as well.

    Args:
        labels_BL: int64, read where ``positive_BL``; any class elsewhere.
    """

    def negative(x: Tensor) -> Tensor:
        return 0.75 * ops.square(ops.sigmoid(x)) * ops.softplus(x)

    own_BL = ops.squeeze(ops.take_along_axis(logits_BLC, labels_BL[:, :, None], 2), 2)
    positive = quality_BL * (ops.softplus(own_BL) - quality_BL * own_BL)
    # No target array of the size of the logits: all as negatives, put right at the labels of the positives.
    corrections_BL = ops.where(positive_BL, positive - negative(own_BL), 0.0)
    return ops.sum(negative(logits_BLC)) + ops.sum(corrections_BL)
