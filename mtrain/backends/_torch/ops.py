"""The neutral functions on torch. ``core/ops.pyi`` is their contract and documents each of them.

torch's own reductions and joins accept ``axis`` and ``keepdims`` as aliases of ``dim`` and ``keepdim``. Where such a
native function fulfils the contract, it is used directly.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain.core.interfaces import Array

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

zeros_like, ones_like = torch.zeros_like, torch.ones_like
detach = Tensor.detach
concat, stack, reshape, permute_dims = torch.concat, torch.stack, torch.reshape, torch.permute
expand_dims, squeeze, broadcast_to = torch.unsqueeze, torch.squeeze, torch.broadcast_to
where, take_along_axis = torch.where, torch.take_along_dim
abs, atan, exp, floor, trunc, round = (
    torch.abs, torch.atan, torch.exp, torch.floor, torch.trunc, torch.round,
)  # fmt: skip
isfinite, log, maximum, minimum, pow, sqrt, square = (
    torch.isfinite, torch.log, torch.maximum, torch.minimum, torch.pow, torch.sqrt, torch.square,
)  # fmt: skip
sigmoid, relu, silu, gelu, softplus, tanh = torch.sigmoid, torch.relu, F.silu, F.gelu, F.softplus, torch.tanh
sum, mean, argmax, all, any = torch.sum, torch.mean, torch.argmax, torch.all, torch.any
cumulative_sum, softmax, log_softmax = torch.cumsum, torch.softmax, torch.log_softmax
matmul, conv2d, scaled_dot_product_attention = torch.matmul, F.conv2d, F.scaled_dot_product_attention
einsum = torch.einsum


def _options(like: Tensor, dtype: str | None) -> dict[str, Any]:
    return {"dtype": like.dtype if dtype is None else _DTYPES[dtype], "device": like.device}


def _axes(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if axis is None:
        return None
    return (axis,) if isinstance(axis, int) else tuple(axis)


def asarray(values: Any, *, like: Tensor | None = None, dtype: str | None = None) -> Tensor:
    if like is None:
        return torch.tensor(values, dtype=None if dtype is None else _DTYPES[dtype])
    # The tensor is made on the host and copied asynchronously: torch.tensor(values, device="cuda") would wait for all
    # queued kernels.
    return torch.tensor(values, dtype=like.dtype if dtype is None else _DTYPES[dtype]).to(
        like.device, non_blocking=True
    )


def constant(values: Any, *, like: Tensor, dtype: str | None = None) -> Tensor:
    if type(like) is not Tensor or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        # A tracer must see the values: what it makes of a tensor does not outlive the trace.
        return asarray(values, like=like, dtype=dtype)
    return _keep(values, like.device, like.dtype if dtype is None else _DTYPES[dtype])


@lru_cache(maxsize=512)
def _keep(values: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


def zeros(shape: Sequence[int], *, like: Tensor, dtype: str | None = None) -> Tensor:
    return torch.zeros(tuple(shape), **_options(like, dtype))


def full(shape: Sequence[int], value: float, *, like: Tensor, dtype: str | None = None) -> Tensor:
    return torch.full(tuple(shape), value, **_options(like, dtype))


def arange(start: int, stop: int, step: int = 1, *, like: Tensor, dtype: str | None = None) -> Tensor:
    return torch.arange(start, stop, step, **_options(like, dtype))


def one_hot(x: Tensor, class_count: int, *, dtype: str = "float32") -> Tensor:
    classes = torch.arange(class_count, device=x.device)
    return (x.unsqueeze(-1) == classes).to(_DTYPES[dtype])


def meshgrid(*arrays: Tensor, indexing: Literal["ij", "xy"] = "xy") -> Sequence[Tensor]:
    return torch.meshgrid(*arrays, indexing=indexing)


def astype(x: Tensor, dtype: str) -> Tensor:
    return x.to(_DTYPES[dtype])


def dtype(x: Tensor) -> str:
    return _NAMES[x.dtype]


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def to_numpy(x: Tensor) -> Array:
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def split(x: Tensor, sizes: Sequence[int], *, axis: int = 0) -> Sequence[Tensor]:
    return torch.split(x, list(sizes), axis)


def nonzero(x: Tensor) -> tuple[Tensor, ...]:
    return torch.nonzero(x, as_tuple=True)


def take(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.index_select(x, axis, indices)


def put_along_axis(
    x: Tensor, indices: Tensor, values: Tensor, *, axis: int, reduce: Literal["set", "add", "max"] = "set"
) -> Tensor:
    if reduce == "set":
        return torch.scatter(x, axis, indices, values)
    if reduce == "add":
        return torch.scatter_add(x, axis, indices, values)
    return torch.scatter_reduce(x.detach(), axis, indices, values.detach(), "amax")


def topk(x: Tensor, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, k, axis)
    return values, indices


def argsort(x: Tensor, *, axis: int = -1, descending: bool = False) -> Tensor:
    return torch.argsort(x, dim=axis, descending=descending, stable=True)


def _clip_by_choosing(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    if not x.is_floating_point():
        return torch.clip(x, min, max)
    if min is not None:
        x = torch.where(x < min, min, x)
    return x if max is None else torch.where(x > max, max, x)


# At the limits themselves torch.clip has the gradient 0 since 2.14 (seen with 2.14.1), where the contract, torch 2.13 and Paddle have 1.
# torch compares its own version as a version, not as text.
clip = torch.clip if torch.__version__ < "2.14" else _clip_by_choosing


def hardsigmoid(x: Tensor, *, slope: float = 1 / 6, offset: float = 0.5) -> Tensor:
    return clip(slope * x + offset, 0.0, 1.0)


def var(
    x: Tensor, *, axis: int | Sequence[int] | None = None, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    return torch.var(x, dim=_axes(axis), correction=correction, keepdim=keepdims)


def max(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    return torch.amax(x, dim=_axes(axis) or (), keepdim=keepdims)


def min(x: Tensor, *, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    return torch.amin(x, dim=_axes(axis) or (), keepdim=keepdims)


def max_pool2d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
    return F.max_pool2d(x, kernel_size, stride, padding)


def avg_pool2d(x: Tensor, kernel_size: int, stride: int | None = None, padding: int = 0) -> Tensor:
    return F.avg_pool2d(x, kernel_size, stride, padding)


def resize_bilinear(x: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)


def upsample_nearest(x: Tensor, scale: int) -> Tensor:
    return F.interpolate(x, scale_factor=scale, mode="nearest")


def binary_cross_entropy_with_logits(logits: Tensor, targets: Tensor, *, positive_weight: float = 1.0) -> Tensor:
    weight = (
        None if positive_weight == 1.0 else torch.full((), positive_weight, dtype=logits.dtype, device=logits.device)
    )
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction="none")


def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)


class _FakeQuantise(torch.autograd.Function):
    """See ``fake_quantise``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, low: float, high: float) -> Tensor:
        levels = torch.round(x.to(scale.dtype) / scale).add_(zero_point)
        ctx.save_for_backward((levels >= low) & (levels <= high))
        return levels.clamp_(low, high).sub_(zero_point).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, dy, 0.0), None, None, None, None


def fake_quantise(x: Tensor, scale: Tensor, zero_point: Tensor, *, low: float, high: float) -> Tensor:
    rounded: Tensor = _FakeQuantise.apply(x, scale, zero_point, low, high)
    return rounded
