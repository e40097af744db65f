"""Dropout by mtrain's own kernel: float32 on the CPU, with the bits of ``nn.Dropout`` and without a mask in memory."""

from typing import Any, cast

import torch
from torch import Tensor

from mtrain.backends._kernels import library
from mtrain.backends._torch import internals
from mtrain.core.network import noise


def fits(x: Tensor) -> bool:
    """Return whether the kernel can do it. What a subclass of tensors holds is not known."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.is_contiguous()
        and not internals.is_traced()
        and library.load_dropout().kernels is not None
    )


class Function(torch.autograd.Function):
    """Autograd function of a layer; its gradient drops the same elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, random_key: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(random_key)
        ctx.layer = layer
        if not fits(x):  # a gradient may lie in memory in another order
            return cast(Tensor, x * layer.mask(x, random_key))
        y, batch, keys, p = torch.empty_like(x), len(x), random_key.contiguous(), layer.p
        sizes = (batch, x.numel() // max(batch, 1), layer.code, noise.threshold(p), 1 / (1 - p))
        kernel = library.load_dropout().kernels.apply
        kernel(x.data_ptr(), keys.data_ptr(), *sizes, y.data_ptr(), torch.get_num_threads())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return Function.apply(dy, *ctx.saved_tensors, ctx.layer), None, None
