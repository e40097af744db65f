"""BatchNorm, alone or followed by SiLU, by mtrain's own kernels: float32 on the CPU."""

import os
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from mtrain.backends._kernels import library
from mtrain.backends._paddle import internals
from mtrain.core.interfaces import Array
from mtrain.errors import TrainingError

# Legend: B batch, C channels, H, W.


def fit(x_BCHW: Tensor, weight_C: Tensor) -> bool:
    """Return whether the kernels can normalise this input."""
    return (
        paddle.in_dynamic_mode()
        and x_BCHW.dtype == weight_C.dtype == paddle.float32
        and x_BCHW.ndim == 4
        and bool(x_BCHW.place.is_cpu_place())
    )


@dataclass(frozen=True, slots=True)
class Running:
    """Running statistics of a layer, which a forward pass moves towards those of its micro batch, in place."""

    mean_C: Tensor
    var_C: Tensor
    take: float
    """Share of the micro batch."""
    correction: float
    """Factor of its biased variance."""


def normalize(x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, *, eps: float, silu: bool, running: Running) -> Tensor:
    """Normalise with the statistics of this micro batch, with SiLU where asked; ``fit`` says for which input.

    The output of BatchNorm itself is not kept: the backward pass computes it again from the input, of which autograd keeps
    one copy for both functions.
    """
    return cast(Tensor, _KernelNormalize.apply(x_BCHW, weight_C, bias_C, eps=eps, silu=int(silu), running=running))


class _KernelNormalize(PyLayer):
    """Autograd function for y = act((x - mean) / sqrt(var + eps) * weight + bias)."""

    @staticmethod
    def forward(ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, **settings: Any) -> Tensor:
        running, silu = settings["running"], settings["silu"]
        x_BCHW = dense(x_BCHW)
        y_BCHW, sizes = internals.empty_like(x_BCHW), _sizes(x_BCHW)
        moments_3C = np.empty((3, sizes[1]))
        moments = _rows(moments_3C)
        _kernels().forward(
            x_BCHW.data_ptr(), *sizes, settings["eps"], weight_C.data_ptr(), bias_C.data_ptr(), silu, y_BCHW.data_ptr(),
            *moments, running.mean_C.data_ptr(), running.var_C.data_ptr(), running.take, running.correction, count_threads(),
        )  # fmt: skip
        ctx.save_for_backward(x_BCHW, weight_C, bias_C)
        # The statistics are no output: Paddle 2.6 crashes on outputs without gradient.
        ctx.kept = silu, sizes, moments_3C
        ctx.needs_gradient = [not tensor.stop_gradient for tensor in (x_BCHW, weight_C, bias_C)]
        return y_BCHW

    @staticmethod
    def backward(ctx: Any, dy_BCHW: Tensor) -> Any:
        refuse_second_gradient("train.kernels: framework")
        silu, sizes, moments_3C = ctx.kept
        x_BCHW, weight_C, bias_C = ctx.saved_tensor()
        dy_BCHW = dense(dy_BCHW)
        grads = [internals.empty_like(tensor) for tensor in (x_BCHW, weight_C, bias_C)]
        mean, _, inverse = _rows(moments_3C)
        _kernels().backward(
            x_BCHW.data_ptr(), dy_BCHW.data_ptr(), *sizes, weight_C.data_ptr(), bias_C.data_ptr(), silu,
            mean, inverse, *(grad.data_ptr() for grad in grads), count_threads(),
        )  # fmt: skip
        # For an input that needs no gradient, Paddle accepts only None.
        return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_gradient, strict=True))


def refuse_second_gradient(instead: str) -> None:
    """Refuse a backward pass that is to be differentiated itself, which would lose part of that gradient without a word.

    Raises:
        TrainingError: it is; ``instead`` is what to write in the spec.
    """
    if paddle.is_grad_enabled():
        raise TrainingError(
            f"a gradient of a gradient (create_graph=True) goes through mtrain's BatchNorm, which has none; write {instead}"
        )


def _kernels() -> Any:
    kernels = library.load_planes().kernels
    assert kernels is not None, "the engine checks this before it calls use"
    return kernels


def _sizes(x_BCHW: Tensor) -> tuple[int, int, int]:
    batch, channels, height, width = x_BCHW.shape
    return batch, channels, height * width


def _rows(array: Array) -> list[int]:
    """Return the addresses of the rows of a dense matrix."""
    return [array.ctypes.data + row * array.strides[0] for row in range(len(array))]


def dense(x: Tensor) -> Tensor:
    """Return ``x`` itself if its memory lies in the order of its shape; a copy otherwise."""
    return x if x.is_contiguous() else x.contiguous()


def count_threads() -> int:
    """Return how many threads a rank has; its starter sets the variable."""
    return int(os.environ.get("OMP_NUM_THREADS") or 1)
