"""BatchNorm, alone or followed by SiLU, by mtrain's own kernels: float32 in channels-last layout on the CPU."""

from typing import Any, cast

import torch
from torch import Tensor

from mtrain.backends._kernels import library
from mtrain.backends._torch import batchnorm
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends.engine import LocalCollective

# Legend: B batch, C channels, H, W.


def fit(x_BCHW: Tensor, weight_C: Tensor) -> bool:
    """Return whether the kernels can normalise this input."""
    return (
        x_BCHW.device.type == "cpu"
        and x_BCHW.dtype == weight_C.dtype == torch.float32
        and x_BCHW.dim() == 4
        and x_BCHW.numel() > x_BCHW.shape[1]
        and x_BCHW.is_contiguous(memory_format=torch.channels_last)
    )


def normalize(
    x_BCHW: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    *,
    eps: float,
    silu: bool,
    collective: TorchCollective | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what ``batchnorm.normalize`` does, and SiLU where asked; ``fit`` says for which input.

    The output of BatchNorm itself is not kept: the backward pass computes it again from the input, of which autograd
    keeps one copy for both functions.
    """
    outputs = _KernelNormalize.apply(x_BCHW, weight_C, bias_C, (eps, silu, collective or LocalCollective()))
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], outputs)


class _KernelNormalize(torch.autograd.Function):
    """Autograd function for y = act((x - mean) / sqrt(var + eps) * weight + bias); see ``batchnorm._Normalize``."""

    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, settings: tuple[float, bool, TorchCollective]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        eps, silu, collective = settings
        kernels, (pixels, channels) = _kernels(), _shape(x_BCHW)
        weight_C, bias_C = weight_C.contiguous(), bias_C.contiguous()
        mean_C, var_C = torch.empty((2, channels), dtype=torch.float64).unbind(0)
        threads = torch.get_num_threads()
        kernels.statistics(x_BCHW.data_ptr(), pixels, channels, mean_C.data_ptr(), var_C.data_ptr(), threads)
        total = mean_C.new_tensor(pixels)
        if collective.size > 1:
            mean_C, var_C, total = batchnorm.merge_over_ranks(mean_C, var_C, total, collective)
        inverse_C = torch.rsqrt(var_C + eps)
        y_BCHW = torch.empty_like(x_BCHW, memory_format=torch.channels_last)
        addresses = _addresses(mean_C, inverse_C, weight_C, bias_C)
        kernels.output(x_BCHW.data_ptr(), pixels, channels, *addresses, int(silu), y_BCHW.data_ptr(), threads)
        ctx.save_for_backward(x_BCHW, weight_C, bias_C, mean_C, inverse_C, total)
        ctx.settings = settings
        ctx.mark_non_differentiable(mean_C, var_C, total)
        return y_BCHW, mean_C, var_C, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        eps, silu, collective = ctx.settings
        x_BCHW, weight_C, bias_C, mean_C, inverse_C, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            arrays, settings = (x_BCHW, weight_C, bias_C), {"eps": eps, "collective": collective, "silu": silu}
            return *batchnorm.differentiable_gradients(ctx, arrays, grads[0], **settings), None
        kernels, (pixels, channels), threads = _kernels(), _shape(x_BCHW), torch.get_num_threads()
        dy_BCHW = _evenly_spaced(grads[0])
        dx_BCHW = torch.empty_like(x_BCHW, memory_format=torch.channels_last)
        sums_2C = torch.empty((2, channels), dtype=torch.float64)
        addresses = _addresses(mean_C, inverse_C, weight_C, bias_C)
        x, dy, dx, spacing = x_BCHW.data_ptr(), dy_BCHW.data_ptr(), dx_BCHW.data_ptr(), _spacing(dy_BCHW)
        # The gradient of SiLU's input is left where that of the input will be.
        kernels.gradient_sums(
            x, dy, spacing, pixels, channels, *addresses, int(silu), dx, sums_2C.data_ptr(), threads
        )  # fmt: skip
        grad_bias, grad_weight = sums_2C.to(weight_C.dtype).unbind(0)
        if collective.size > 1:
            sums_2C = collective.all_reduce(sums_2C, "sum")
        means_2C = (sums_2C / total).contiguous()
        dz, spacing = (dx, channels) if silu else (dy, spacing)
        kernels.input_gradient(x, dz, spacing, pixels, channels, *addresses[:3], means_2C.data_ptr(), dx, threads)
        return dx_BCHW, grad_weight, grad_bias, None


def _kernels() -> Any:
    kernels = library.load().kernels
    assert kernels is not None, "syncbn.use_kernels checks this"
    return kernels


def _shape(x_BCHW: Tensor) -> tuple[int, int]:
    channels = x_BCHW.shape[1]
    return x_BCHW.numel() // channels, channels


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _spacing(x_BCHW: Tensor) -> int:
    """Return how many numbers lie between pixels of a tensor that ``_evenly_spaced`` returned."""
    _, channels, height, width = x_BCHW.shape
    if width > 1:
        return x_BCHW.stride(3)
    if height > 1:
        return x_BCHW.stride(2)
    return x_BCHW.stride(0) if len(x_BCHW) > 1 else channels


def _evenly_spaced(x_BCHW: Tensor) -> Tensor:
    """Return ``x`` itself if it is some channels of a channels-last tensor, as after a join; a copy otherwise."""
    batch, channels, height, width = x_BCHW.shape
    spacing = _spacing(x_BCHW)
    expected = (spacing * height * width, 1, spacing * width, spacing)
    sizes = x_BCHW.shape
    even = all(
        size == 1 or stride == wanted for size, stride, wanted in zip(sizes, x_BCHW.stride(), expected, strict=True)
    )
    if x_BCHW.dtype == torch.float32 and even and (spacing >= channels or batch * height * width == 1):
        return x_BCHW
    return x_BCHW.float().contiguous(memory_format=torch.channels_last)
