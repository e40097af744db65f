"""The neutral functions on Paddle. ``core/ops.pyi`` is their contract and documents each of them.

Where a native function fulfils the contract, it is used directly. Paddle differs in these points: it may round a Python
number next to a float64 tensor to float32 (so such a number becomes a tensor of the other's dtype first), its sorting
is stable only on request, and its cross entropy gives no gradient to the targets.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from mtrain.backends._paddle import internals, paddle2_compatibility
from mtrain.core.interfaces import Array

_DTYPES = {
    "float64": paddle.float64,
    "float32": paddle.float32,
    "bfloat16": paddle.bfloat16,
    "float16": paddle.float16,
    "int64": paddle.int64,
    "int32": paddle.int32,
    "uint8": paddle.uint8,
    "bool": paddle.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WIDE_SUMS = (paddle.bool, paddle.uint8, paddle.int32)
"""Types that are added up as int64."""

_kept: dict[Any, Tensor] = {}
"""What ``constant`` has sent to a device, by values, place and dtype."""

zeros_like, ones_like = paddle.zeros_like, paddle.ones_like
concat, stack, reshape, permute_dims = paddle.concat, paddle.stack, paddle.reshape, paddle.transpose
expand_dims, squeeze, broadcast_to = paddle.unsqueeze, paddle.squeeze, paddle.broadcast_to
take_along_axis = paddle.take_along_axis
abs, atan, clip, exp, floor, trunc, round = (
    paddle.abs, paddle.atan, paddle.clip, paddle.exp, paddle.floor, paddle.trunc, paddle.round,
)  # fmt: skip
isfinite, log, maximum, minimum, sqrt, square = (
    paddle.isfinite, paddle.log, paddle.maximum, paddle.minimum, paddle.sqrt, paddle.square,
)  # fmt: skip
sigmoid, relu, silu, softplus, tanh = F.sigmoid, F.relu, F.silu, F.softplus, paddle.tanh
softmax = F.softmax
matmul, conv2d, einsum = paddle.matmul, F.conv2d, paddle.einsum


def detach(x: Tensor) -> Tensor:
    # A method of the argument: in a program that is traced, it is no `paddle.Tensor`.
    return x.detach()


def _as_type_of(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor of shape () and of the dtype of ``like``."""
    return paddle.full((), value, like.dtype)


def _axes(axis: int | Sequence[int] | None) -> int | list[int] | None:
    return axis if axis is None or isinstance(axis, int) else list(axis)


def asarray(values: Any, *, like: Tensor | None = None, dtype: str | None = None) -> Tensor:
    if like is None:
        return paddle.to_tensor(values, None if dtype is None else _DTYPES[dtype], paddle.CPUPlace())
    return paddle.to_tensor(values, like.dtype if dtype is None else _DTYPES[dtype], like.place)


def constant(values: Any, *, like: Tensor, dtype: str | None = None) -> Tensor:
    if not paddle.in_dynamic_mode():
        return asarray(values, like=like, dtype=dtype)
    key = values, str(like.place), like.dtype if dtype is None else _DTYPES[dtype]
    if key not in _kept:
        _kept[key] = paddle.to_tensor(values, key[2], like.place)
    return _kept[key]


def zeros(shape: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    return full(shape, 0, like=like, dtype=dtype)


def full(shape: Sequence[int], value: float, *, like: Tensor, dtype: str | None = None) -> Tensor:
    return paddle.full(tuple(shape), value, like.dtype if dtype is None else _DTYPES[dtype])


def arange(start: int, stop: int, step: int = 1, *, like: Tensor, dtype: str | None = None) -> Tensor:
    return paddle.arange(start, stop, step, like.dtype if dtype is None else _DTYPES[dtype])


def one_hot(x: Tensor, class_count: int, *, dtype: str = "float32") -> Tensor:
    classes = paddle.arange(0, class_count, 1, x.dtype)
    return (paddle.unsqueeze(x, -1) == classes).astype(_DTYPES[dtype])


def meshgrid(*arrays: Tensor, indexing: Literal["ij", "xy"] = "xy") -> Sequence[Tensor]:
    grids: list[Tensor] = paddle.meshgrid(*arrays)
    if indexing == "ij" or len(arrays) < 2:
        return grids
    swapped = [1, 0, *range(2, len(arrays))]
    return [paddle.transpose(grid, swapped) for grid in grids]


def astype(x: Tensor, dtype: str) -> Tensor:
    target_dtype = _DTYPES[dtype]
    return x if x.dtype == target_dtype else paddle.cast(x, target_dtype)


def dtype(x: Tensor) -> str:
    return _NAMES[x.dtype]


def shape(x: Tensor) -> tuple[int, ...]:
    if paddle.in_dynamic_mode() or -1 not in x.shape:
        return tuple(x.shape)
    # A program that is written for any size computes an unknown one when it runs. Reshapes to a constant shape (with -1) are
    # merged by the CPU predictor with what is before them, which fails for some.
    known: Sequence[int] = x.shape
    sizes: Any = paddle.shape(x)
    return tuple(sizes[axis] if size == -1 else size for axis, size in enumerate(known))


def to_numpy(x: Tensor) -> Array:
    x = x.detach()
    # `numpy` of a tensor within a larger buffer copies all of that buffer; a clone has one of its own. Paddle 2.6 clones no empty one.
    own = x.astype(paddle.float32) if x.dtype == paddle.bfloat16 else x.clone() if int(x.size) else x
    return np.asarray(own.numpy())


def split(x: Tensor, sizes: Sequence[int], *, axis: int = 0) -> Sequence[Tensor]:
    return paddle.split(x, list(sizes), axis)


def where(condition: Tensor, x1: Tensor | float, x2: Tensor | float) -> Tensor:
    like = x1 if isinstance(x1, Tensor) else x2 if isinstance(x2, Tensor) else paddle.zeros(())
    x1, x2 = (x if isinstance(x, Tensor) else _as_type_of(x, like) for x in (x1, x2))
    return paddle.where(condition, x1, x2)


def nonzero(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(paddle.unbind(paddle.nonzero(x), 1))


def take(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return paddle.index_select(x, indices, axis)


def put_along_axis(
    x: Tensor, indices: Tensor, values: Tensor, *, axis: int, reduce: Literal["set", "add", "max"] = "set"
) -> Tensor:
    if reduce == "max":
        return internals.put_along_axis(x.detach(), indices, values.detach(), axis, "amax")
    return internals.put_along_axis(x, indices, values, axis, "assign" if reduce == "set" else "add")


def topk(x: Tensor, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    values, indices = paddle.topk(x, k, axis)
    return values, indices


def argsort(x: Tensor, *, axis: int = -1, descending: bool = False) -> Tensor:
    return paddle.argsort(x, axis, descending, stable=True)


def pow(x: Tensor, exponent: float) -> Tensor:
    return paddle.pow(x, _as_type_of(exponent, x))  # Paddle would round a Python number to float32


def gelu(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    return F.gelu(x, approximate == "tanh")


def hardsigmoid(x: Tensor, *, slope: float = 1 / 6, offset: float = 0.5) -> Tensor:
    return clip(slope * x + offset, 0.0, 1.0)


def sum(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    return paddle.sum(x, _axes(axis), "int64" if x.dtype in _WIDE_SUMS else None, keepdims)


def mean(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    axes = _axes(axis)
    if paddle.in_dynamic_mode() and axes == list(range(x.ndim - 2, x.ndim)):
        # The gradient of a mean over two axes takes seven times as long as that over one.
        flat = paddle.mean(paddle.flatten(x, x.ndim - 2), -1)
        return paddle.unsqueeze(flat, axes) if keepdims else flat
    return paddle.mean(x, axes, keepdims)


def var(
    x: Tensor, *, axis: int | Sequence[int] | None = None, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    axes = _axes(axis)
    squares = paddle.square(x - paddle.mean(x, axes, keepdim=True))
    total = paddle.sum(squares, axes, None, keepdims)
    return total / (math.prod(x.shape) / math.prod(total.shape) - correction)


def max(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    return paddle.amax(x, _axes(axis), keepdims)


def min(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    return paddle.amin(x, _axes(axis), keepdims)


def argmax(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    return paddle.argmax(x, axis, keepdims)


def all(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    return paddle.all(astype(x, "bool"), axis, keepdims)


def any(x: Tensor, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    return paddle.any(astype(x, "bool"), axis, keepdims)


def cumulative_sum(x: Tensor, *, axis: int) -> Tensor:
    return paddle.cumsum(x.astype(paddle.int64) if x.dtype in _WIDE_SUMS else x, axis)


def log_softmax(x: Tensor, axis: int) -> Tensor:
    if not paddle.in_dynamic_mode():
        return x - paddle.logsumexp(x, axis, keepdim=True)  # Paddle's own log_softmax does not go below -64
    # The same in a quarter of the time that paddle.logsumexp takes; a constant that is subtracted has no gradient.
    shifted = x - paddle.amax(x.detach(), axis, keepdim=True)
    return shifted - paddle.log(paddle.sum(paddle.exp(shifted), axis, keepdim=True))


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = paddle.matmul(query, key, transpose_y=True) * (1 / math.sqrt(query.shape[-1]))
    return paddle.matmul(F.softmax(scores, -1), value)


def max_pool2d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
    return F.max_pool2d(x, kernel_size, stride, padding)


def avg_pool2d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
    if x.dtype != paddle.float64:
        return F.avg_pool2d(x, kernel_size, stride, padding, exclusive=False)
    # The gradient of Paddle's kernel rounds the size of the window to float32.
    return _map(x, [_averaging(n, kernel_size, stride or kernel_size, padding) for n in x.shape[2:]])


def _averaging(old: int, kernel_size: int, stride: int, padding: int) -> Array:
    """Return the matrix (new, old) that averages windows of a line of ``old`` pixels."""
    starts = np.arange((old + 2 * padding - kernel_size) // stride + 1)[:, None] * stride - padding
    pixels = np.arange(old)
    return ((pixels >= starts) & (pixels < starts + kernel_size)) / kernel_size


def _map(x: Tensor, matrices: Sequence[Array]) -> Tensor:
    """Apply one matrix to the columns and one to the rows of (B, C, H, W)."""
    down, across = (paddle.to_tensor(matrix, place=x.place) for matrix in matrices)
    return paddle.matmul(paddle.matmul(down, x), across, transpose_y=True)


def resize_bilinear(x: Tensor, size: Sequence[int]) -> Tensor:
    if x.dtype != paddle.float64:
        return F.interpolate(x, size=list(size), mode="bilinear", align_corners=False)
    # Paddle's kernel rounds the places of pixels to float32.
    return _map(x, [_bilinear(n, m) for n, m in zip(x.shape[2:], size, strict=True)])


def _bilinear(old: int, new: int) -> Array:
    """Return the matrix (new, old) that interpolates ``old`` pixels of a line linearly to ``new`` pixels."""
    place = np.clip((np.arange(new) + 0.5) * (old / new) - 0.5, 0, old - 1)
    before = np.floor(place).astype(np.int64)
    share, matrix, lines = place - before, np.zeros((new, old)), np.arange(new)
    np.add.at(matrix, (lines, before), 1 - share)
    np.add.at(matrix, (lines, np.minimum(before + 1, old - 1)), share)
    return matrix


def upsample_nearest(x: Tensor, scale: int) -> Tensor:
    if paddle.in_dynamic_mode():
        return F.interpolate(x, scale_factor=scale, mode="nearest")
    # Paddle's CPU predictor (oneDNN) cannot run its interpolation: it refuses the list of factors, even an empty one.
    batch, channels, height, width = shape(x)
    repeated = paddle.tile(reshape(x, (batch, channels, height, 1, width, 1)), (1, 1, 1, scale, 1, scale))
    return reshape(repeated, (batch, channels, height * scale, width * scale))


def binary_cross_entropy_with_logits(logits: Tensor, targets: Tensor, *, positive_weight: float = 1.0) -> Tensor:
    if positive_weight == 1.0 and targets.stop_gradient:
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    # Paddle's kernel gives no gradient to the targets, so the formula is written out.
    return (1 - targets) * F.softplus(logits) + positive_weight * targets * F.softplus(-logits)


def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    classes = logits.shape[1]
    target = one_hot(labels, classes, dtype=dtype(logits)) * (1 - label_smoothing) + label_smoothing / classes
    return -paddle.sum(target * log_softmax(logits, 1), 1)


if paddle2_compatibility.NEEDED:
    paddle2_compatibility.mend_operators()
    globals().update(paddle2_compatibility.FUNCTIONS)


class _FakeQuantise(PyLayer):
    """See ``fake_quantise``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, low: float, high: float) -> Tensor:
        levels = (
            round(astype(x, dtype(scale)) / scale) + zero_point
        )  # of Paddle 2.6 too, whose own takes halves away from 0
        ctx.save_for_backward((levels >= _as_type_of(low, levels)) & (levels <= _as_type_of(high, levels)))
        return astype((paddle.clip(levels, low, high) - zero_point) * scale, dtype(x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (inside,) = ctx.saved_tensor()
        return paddle.where(inside, dy, paddle.zeros_like(dy)), None, None


def fake_quantise(x: Tensor, scale: Tensor, zero_point: Tensor, *, low: float, high: float) -> Tensor:
    scale, zero_point = scale.detach(), zero_point.detach()
    rounded: Tensor = _FakeQuantise.apply(x, scale, zero_point, low, high)
    return rounded
