"""Classification losses that detectors share."""

from mtrain.core import ops
from mtrain.core.interfaces import Tensor


def focal_cross_entropy(
    logits: Tensor, targets: Tensor, *, positive_weight: float = 1.0, gamma: float = 0.0, alpha: float = 0.25
) -> Tensor:
    """Compute binary cross entropy with logits, element by element; a ``gamma`` > 0 makes it the focal loss.

    The focal loss multiplies it by ``alpha_t * (1 - p_t) ** gamma``, where ``p_t`` and ``alpha_t`` are linear between
    targets 0 and 1. Lin et al. 2017, Focal Loss, equation 5.
    """
    loss = ops.binary_cross_entropy_with_logits(logits, targets, positive_weight=positive_weight)
    if gamma == 0:
        return loss
    probability = ops.sigmoid(logits)
    missed = 1 - (targets * probability + (1 - targets) * (1 - probability))
    return loss * (targets * alpha + (1 - targets) * (1 - alpha)) * ops.pow(missed, gamma)


def varifocal_sum(logits_BLC: Tensor, labels_BL: Tensor, quality_BL: Tensor, positive_BL: Tensor) -> Tensor:
    """Compute the varifocal loss, summed to a scalar.

    Zhang et al. 2021, VarifocalNet, equation 2, with alpha 0.75 and gamma 2. Let ``p = sigmoid(logits)``. At a positive
    point the class of its label has the target ``q``, the point's quality in 0..1, and the loss ``q * BCE(p, q)``.
    Every other class of every point has the loss ``0.75 * p ** 2 * BCE(p, 0)``. The gradient flows through the weight
    ``p ** 2`` as well.

    Args:
        logits_BLC: Class logits of each point.
        labels_BL: int64; where ``positive_BL`` is False, any valid class, which is ignored.
        quality_BL: Target score of the label in 0..1.
        positive_BL: bool; whether a point is responsible for an object.
    """

    def negative(x: Tensor) -> Tensor:
        return 0.75 * ops.square(ops.sigmoid(x)) * ops.softplus(x)

    own_BL = ops.squeeze(ops.take_along_axis(logits_BLC, labels_BL[:, :, None], 2), 2)
    positive = quality_BL * (ops.softplus(own_BL) - quality_BL * own_BL)
    # This avoids a target array as large as the logits: all elements count as negatives, and those at the labels of
    # positives are corrected.
    corrections_BL = ops.where(positive_BL, positive - negative(own_BL), 0.0)
    return ops.sum(negative(logits_BLC)) + ops.sum(corrections_BL)
