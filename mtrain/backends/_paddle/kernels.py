"""Kernels that Paddle gives no public name: the only place that calls ``paddle._C_ops``."""

import math
from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor

_KERNELS: Any = paddle._C_ops
_NO_MASTER_WEIGHTS, _NOT_MULTI_PRECISION, _NO_RESCALING = None, False, 1.0


def add_(x: Tensor, factor: float, y: Tensor) -> None:
    """``x += factor * y`` in one pass over memory, ``factor`` in the type of ``x``."""
    _KERNELS.sgd_(x, paddle.full([1], -factor, x.dtype), y, _NO_MASTER_WEIGHTS, _NOT_MULTI_PRECISION)


def momentum_(  # noqa: PLR0913 - the kernel has as many
    x: Tensor, velocity: Tensor, grad: Tensor, *, rate: float, momentum: float, decay: float, nesterov: bool
) -> None:
    """One update of SGD with momentum and coupled weight decay, in one pass over memory.

    ``momentum`` and ``decay`` are float32 inside, whatever the type of ``x``.
    """
    factor = paddle.full([1], rate, x.dtype)
    constants = (momentum, nesterov, "l2_decay", decay, _NOT_MULTI_PRECISION, _NO_RESCALING)
    _KERNELS.momentum_(x, grad, velocity, factor, _NO_MASTER_WEIGHTS, *constants)


def norm(tensors: Sequence[Tensor]) -> float:
    """L2 norm over all elements of all tensors; waits for the device.

    Not ``paddle.linalg.norm``, which on CPU adds float32 up one after the other: 0.3 % off for 4 million numbers.
    """
    return math.sqrt(sum(_KERNELS.squared_l2_norm(tensor).item() for tensor in tensors))
