"""Corrections for Paddle 2.6 where it differs from ``core/ops.pyi``; with Paddle 3 nothing here is used.

These differences remain: most functions refuse tensors without elements, ``%`` has no gradient, and int64 is compared
with a Python number as float32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.version import major

NEEDED = int(major) < 3

_FLOATS = (paddle.float64, paddle.float32)


def mend_operators() -> None:
    """Make a Python number next to a float tensor keep its precision.

    Paddle 2.6 rounds such a number to float32, and turns a division into a product.
    """
    for name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mod__", "__truediv__"):
        numbers = (float, int) if name == "__truediv__" else float
        setattr(Tensor, name, _exact(getattr(Tensor, name), numbers))


def _exact(native: Callable[..., Tensor], numbers: Any) -> Callable[..., Tensor]:
    def operator(x: Tensor, other: Any) -> Tensor:
        if isinstance(other, numbers) and x.dtype in _FLOATS:
            other = number_like(other, x)
        return native(x, other)

    return operator


def number_like(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor () of the dtype of ``like``; ``paddle.full`` would round it to float32."""
    return paddle.to_tensor(value, like.dtype, like.place)


def full(shape: Any, value: float, *, like: Tensor, dtype: str | None = None) -> Tensor:
    """See ``core/ops.pyi``."""
    filled = np.full(tuple(shape), value, dtype or str(like.dtype).removeprefix("paddle."))
    return paddle.to_tensor(filled, place=like.place)


def argsort(x: Tensor, *, axis: int = -1, descending: bool = False) -> Tensor:
    """See ``core/ops.pyi``. Sorts on the host, because Paddle 2.6 has no stable sort."""
    values = x.detach().numpy()
    order = np.argsort(-values if descending else values, axis, kind="stable")
    return paddle.to_tensor(order, place=x.place)


def round(x: Tensor) -> Tensor:
    """See ``core/ops.pyi``."""
    up = paddle.floor(x + 0.5)
    to_even = (up - x == 0.5) & (up % 2 != 0)
    return paddle.where(to_even, up - 1, up)


def take(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """See ``core/ops.pyi``."""
    if x.dtype == paddle.bool:
        return paddle.index_select(x.astype("int32"), indices, axis).astype("bool")
    return paddle.index_select(x, indices, axis)


def where(condition: Tensor, x1: Tensor | float, x2: Tensor | float) -> Tensor:
    """See ``core/ops.pyi``."""
    like = x1 if isinstance(x1, Tensor) else x2 if isinstance(x2, Tensor) else paddle.zeros(())
    x1, x2 = (x if isinstance(x, Tensor) else number_like(x, like) for x in (x1, x2))
    if like.dtype == paddle.bool:
        return paddle.where(condition, x1.astype("int32"), x2.astype("int32")).astype("bool")
    return paddle.where(condition, x1, x2)


def clip(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """See ``core/ops.pyi``."""
    if min is not None:
        x = paddle.where(x < min, number_like(min, x), x)
    return x if max is None else paddle.where(x > max, number_like(max, x), x)


def maximum(x1: Tensor, x2: Tensor) -> Tensor:
    """See ``core/ops.pyi``."""
    return paddle.maximum(x1, x2) if _constant(x1, x2) else _extremum(x1 > x2, x1, x2)


def minimum(x1: Tensor, x2: Tensor) -> Tensor:
    """See ``core/ops.pyi``."""
    return paddle.minimum(x1, x2) if _constant(x1, x2) else _extremum(x1 < x2, x1, x2)


def _constant(x1: Tensor, x2: Tensor) -> bool:
    return bool(x1.stop_gradient and x2.stop_gradient)


def _extremum(first: Tensor, x1: Tensor, x2: Tensor) -> Tensor:
    """Return ``x1`` where ``first`` holds, else ``x2``; where they are equal, each gets half of the gradient."""
    return paddle.where(x1 == x2, (x1 + x2) * 0.5, paddle.where(first, x1, x2))


FUNCTIONS = {
    "argsort": argsort, "clip": clip, "full": full, "maximum": maximum, "minimum": minimum, "round": round,
    "take": take, "where": where,
}  # fmt: skip
"""The corrected functions by their names in ``ops.py``."""
