"""What a loss must be that a user's code has computed."""

import math
from typing import Any


def problem_of(loss: Any) -> str:
    """Return why a value cannot be minimised, as the rest of a sentence about it; empty if it can be."""
    if not (hasattr(loss, "backward") and hasattr(loss, "shape")):
        return f"is a {type(loss).__name__}; expected the loss, a tensor with one number"
    if math.prod(loss.shape) != 1:
        return (
            f"has the shape {tuple(loss.shape)}; expected a single number: the mean over the micro batch, loss.mean()"
        )
    # Paddle marks a tensor without gradient by ``stop_gradient``, torch by ``requires_grad``.
    if getattr(loss, "stop_gradient", False) or getattr(loss, "requires_grad", True) is False:
        return "carries no gradient; compute it from trained parameters, outside of no_grad and without detach()"
    return ""
