"""Convolutions whose weight's gradient mtrain computes: float32 in channels-last layout, by one thread, with AVX2.

oneDNN has fast kernels for it with AVX-512. With AVX2 it reads the images once for each few channels of both sides.
``_kernels/convolution.c`` reads them less often, adds in the same order, and so gives the same bits.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.backends._kernels import library
from mtrain.backends._torch import internals
from mtrain.core.overriding import override

_ORDINARY = {"padding_mode": "zeros", "dilation": (1, 1), "groups": 1, "bias": None}


class KernelConv2d(nn.Conv2d):
    """A Conv2d with mtrain's kernel for its weight's gradient where it fits."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.weight.requires_grad and _fits(input, self.weight):
            output: Tensor = _Convolution.apply(input, self.weight, self.stride, self.padding)
            return output
        return super().forward(input)


def use_kernels(model: nn.Module) -> None:
    """Make the convolutions of ``model`` that the kernel can serve use it, in place, on processors that gain by it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or library.load_convolution().kernels is None:
        return
    for module in model.modules():
        if type(module) is nn.Conv2d and all(getattr(module, name) == value for name, value in _ORDINARY.items()):
            square = all(len({*sizes}) == 1 for sizes in (module.kernel_size, module.stride, module.padding))
            if square and module.kernel_size != (1, 1):
                cast(Any, module).__class__ = KernelConv2d


def _fits(x_BCHW: Tensor, weight_OIHW: Tensor) -> bool:
    return (
        not internals.is_traced()
        and torch.get_num_threads() == 1
        and not torch.is_autocast_enabled("cpu")
        and x_BCHW.dim() == 4
        # With one channel, or in images within a kernel's reach, oneDNN adds in another order.
        and x_BCHW.shape[1] > 1
        and min(x_BCHW.shape[2:]) > weight_OIHW.shape[2]
        and all(
            x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last)
            for x in (x_BCHW, weight_OIHW)
        )
    )


class _Convolution(torch.autograd.Function):
    """Autograd function for ``F.conv2d`` without bias."""

    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, weight_OIHW: Tensor, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x_BCHW, weight_OIHW)
        ctx.settings = stride, padding
        return F.conv2d(x_BCHW, weight_OIHW, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x_BCHW, weight_OIHW), (stride, padding) = ctx.saved_tensors, ctx.settings
        dy_BCHW = grads[0].contiguous(memory_format=torch.channels_last)
        is_differentiated = torch.is_grad_enabled()  # by ``create_graph=True``, which the kernel cannot serve
        mask, dx_BCHW = (ctx.needs_input_grad[0], is_differentiated), None
        if any(mask):
            settings = (stride, padding, mask)
            dx_BCHW, dw_OIHW = internals.convolution_gradients(dy_BCHW, x_BCHW, weight_OIHW, *settings)
        if is_differentiated:
            return dx_BCHW, dw_OIHW, None, None
        dw_OIHW = torch.empty_like(weight_OIHW, memory_format=torch.channels_last)
        (images, inputs, *size), (outputs, _, side, _) = x_BCHW.shape, weight_OIHW.shape
        addresses = (x.data_ptr() for x in (x_BCHW, dy_BCHW, dw_OIHW))
        sizes = (images, inputs, *size, outputs, *dy_BCHW.shape[2:], side, stride[0], padding[0])
        library.load_convolution().kernels.weight_gradient(*addresses, *sizes)
        return dx_BCHW, dw_OIHW, None, None
