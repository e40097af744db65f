"""Dropout by mtrain's own kernel: float32 on the CPU, with the bits of ``nn.Dropout`` and without a mask in memory."""

from typing import Any, cast

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from mtrain.backends._kernels import library
from mtrain.backends._paddle import internals, kernels
from mtrain.core.network import noise


def fits(x: Tensor) -> bool:
    """Return whether the kernel can do it."""
    return (
        paddle.in_dynamic_mode()
        and x.dtype == paddle.float32
        and bool(x.place.is_cpu_place())
        and library.load_dropout().kernels is not None
    )


class Function(PyLayer):
    """Autograd function of a layer; its gradient drops the same elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, **settings: Any) -> Tensor:
        ctx.settings = settings
        return _multiplied(x, **settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        # By itself, so that a gradient of a gradient goes through it.
        return cast(Tensor, Function.apply(dy, **ctx.settings))


def _multiplied(x: Tensor, *, random_key: Tensor, layer: Any) -> Tensor:
    x = kernels.dense(x)
    y, batch, least_kept = internals.empty_like(x), x.shape[0], noise.threshold(layer.p)
    sizes = (batch, x.size // max(batch, 1), noise.layer_code(layer.name), least_kept, 1 / (1 - layer.p))
    library.load_dropout().kernels.apply(
        x.data_ptr(), random_key.data_ptr(), *sizes, y.data_ptr(), kernels.count_threads()
    )
    return y
