"""Kernels of Paddle that have no public name. Only this module calls ``paddle._C_ops``."""

import math
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

_KERNELS: Any = paddle._C_ops
_NO_MASTER_WEIGHTS, _NOT_MULTI_PRECISION, _NO_RESCALING = None, False, 1.0


def add_(x: Tensor, factor: float, y: Tensor) -> None:
    """Compute ``x += factor * y`` in one pass over memory, with ``factor`` in the dtype of ``x``."""
    # SGD without momentum is x -= rate * grad.
    _KERNELS.sgd_(x, paddle.full([1], -factor, x.dtype), y, _NO_MASTER_WEIGHTS, _NOT_MULTI_PRECISION)


def momentum_(  # noqa: PLR0913 - the kernel has as many
    x: Tensor, velocity: Tensor, grad: Tensor, *, rate: float, momentum: float, decay: float, nesterov: bool
) -> None:
    """Make one update of SGD with momentum and coupled weight decay, in one pass over memory.

    The kernel rounds ``momentum`` and ``decay`` to float32 for any dtype of ``x``.
    """
    factor = paddle.full([1], rate, x.dtype)
    constants = (momentum, nesterov, "l2_decay", decay, _NOT_MULTI_PRECISION, _NO_RESCALING)
    _KERNELS.momentum_(x, grad, velocity, factor, _NO_MASTER_WEIGHTS, *constants)


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the L2 norm over all elements of all tensors; waits for the device.

    ``paddle.linalg.norm`` is not used: on the CPU it adds float32 numbers one after the other, which is 0.3 % off for 4
    million numbers.
    """
    return math.sqrt(sum(_KERNELS.squared_l2_norm(tensor).item() for tensor in tensors))
