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
    return loss * (targets * alpha + (1 - targets) * (1 - alpha)) * missed**gamma
