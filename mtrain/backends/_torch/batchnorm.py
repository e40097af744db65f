"""BatchNorm for training, with statistics that are exact to rounding in every memory layout, over one or all ranks.

torch's kernel for channels-last tensors on the CPU adds up all pixels of a channel one after the other in float32,
which is up to four digits less exact than its kernel for contiguous tensors (docs/accuracy.md has metrics and a
script). The functions here give that kernel blocks of a few hundred pixels each and join the blocks' sums in float64.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain.backends._torch import internals
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends.engine import LocalCollective
from mtrain.errors import TrainingError

# Legend: B batch, C channels, H, W; P pixels of all images (B * H * W); K blocks of pixels; R ranks.
BLOCK = 256
"""Largest number of pixels that are added one after the other. Up to this many, torch's own kernel is exact enough."""


def needs_blocks(x_BCHW: Tensor) -> bool:
    """Return whether torch's own training kernel would be inexact for this input."""
    return x_BCHW.device.type == "cpu" and x_BCHW.numel() > BLOCK * x_BCHW.shape[1] and _is_channels_last(x_BCHW)


def normalize(
    x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, *, eps: float, collective: TorchCollective | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise with the statistics of this micro batch, over all ranks where ``collective`` is given.

    Returns:
        The output, then without gradient: mean (C,), variance (C,) divided by the count, and the count of pixels (0-d).
    """
    # Before the function, so that what it keeps has its graph for second derivatives.
    x_BCHW = x_BCHW if _is_channels_last(x_BCHW) else x_BCHW.contiguous()
    outputs = _Normalize.apply(x_BCHW, weight_C, bias_C, eps, collective or LocalCollective())
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], outputs)


class _Normalize(torch.autograd.Function):
    """Autograd function for y = (x - mean) / sqrt(var + eps) * weight + bias.

    Several ranks exchange (mean, variance, count) in the forward pass and two sums in the backward pass. Statistics are
    merged as in Chan et al. 1979, which loses nothing to cancellation.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, collective: TorchCollective
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean_C, var_C = _statistics(x_BCHW)
        total = mean_C.new_tensor(x_BCHW.numel() // x_BCHW.shape[1])
        if collective.size > 1:
            mean_C, var_C, total = merge_over_ranks(mean_C, var_C, total, collective)
        inverse_C = torch.rsqrt(var_C + eps)
        compute_dtype = torch.promote_types(x_BCHW.dtype, torch.float32)
        y = F.batch_norm(
            x_BCHW, mean_C.to(compute_dtype), var_C.to(compute_dtype), weight_C, bias_C, training=False, eps=eps
        )
        ctx.save_for_backward(x_BCHW, weight_C, bias_C, mean_C, inverse_C, total)
        ctx.eps, ctx.collective = eps, collective
        ctx.mark_non_differentiable(mean_C, var_C, total)
        return y, mean_C, var_C, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BCHW, weight_C, bias_C, mean_C, inverse_C, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            arrays = x_BCHW, weight_C, bias_C
            return *differentiable_gradients(ctx, arrays, grads[0], eps=ctx.eps, collective=ctx.collective), None, None
        layout = torch.channels_last if _is_channels_last(x_BCHW) else torch.contiguous_format
        dy_BCHW = grads[0].contiguous(memory_format=layout)
        sums_2C = _gradient_sums(dy_BCHW, x_BCHW, mean_C, inverse_C)
        # The gradients of weight and bias stay local: the exchange of gradients averages them like all others.
        grad_bias, grad_weight = sums_2C.to(weight_C.dtype).unbind(0)
        if ctx.collective.size > 1:
            sums_2C = ctx.collective.all_reduce(sums_2C, "sum")
        mean_dy_C, mean_dy_xhat_C = (sums_2C / total).unbind(0)
        # dx = (dy - mean(dy) - xhat * mean(dy * xhat)) * weight / sqrt(var + eps). The factors that are constant per
        # channel are multiplied first, which leaves two passes over the pixels.
        dy_factor_C = weight_C * inverse_C
        x_factor_C = dy_factor_C * inverse_C * mean_dy_xhat_C
        offset_C = x_factor_C * mean_C - dy_factor_C * mean_dy_C
        compute_dtype = torch.promote_types(x_BCHW.dtype, torch.float32)
        dy_factor, x_factor, offset = (
            torch.stack([dy_factor_C, x_factor_C, offset_C]).to(compute_dtype).view(3, 1, -1, 1, 1).unbind(0)
        )
        dx_BCHW = torch.addcmul(offset, x_BCHW, x_factor, value=-1).addcmul_(dy_BCHW, dy_factor)
        return dx_BCHW.to(x_BCHW.dtype), grad_weight, grad_bias, None, None


def differentiable_gradients(
    ctx: Any, arrays: Sequence[Tensor], dy: Tensor, *, eps: float, collective: TorchCollective, silu: bool = False
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias by torch's own functions, for ``create_graph=True``.

    Raises:
        TrainingError: the statistics are those of several ranks.
    """
    if collective.size > 1:
        raise TrainingError(
            "a gradient of a gradient (create_graph=True) goes through a BatchNorm over all ranks, which has none; write "
            "train.sync_batchnorm: false"
        )
    x_BCHW, weight_C, bias_C = arrays
    needed = [array for array, is_needed in zip(arrays, ctx.needs_input_grad, strict=False) if is_needed]
    y = F.batch_norm(x_BCHW, None, None, weight_C, bias_C, training=True, eps=eps)
    found = iter(torch.autograd.grad(F.silu(y) if silu else y, needed, dy, create_graph=True))
    return tuple(next(found) if is_needed else None for is_needed in ctx.needs_input_grad[:3])


def merge_over_ranks(
    mean_C: Tensor, var_C: Tensor, count: Tensor, collective: TorchCollective
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge each rank's mean, variance and pixel count into those over all ranks; every rank must call."""
    channels = len(mean_C)
    gathered = collective.all_gather_tensor(torch.cat([mean_C, var_C, count.view(1)]))
    means_RC, vars_RC, counts_R1 = gathered.split([channels, channels, 1], dim=1)
    total = counts_R1.sum()
    mean_C = (means_RC * counts_R1).sum(0) / total
    return mean_C, ((vars_RC + (means_RC - mean_C).square()) * counts_R1).sum(0) / total, total


def _statistics(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of each channel; float64 on the CPU."""
    if x_BCHW.device.type != "cpu":
        var_C, mean_C = torch.var_mean(
            x_BCHW.to(torch.promote_types(x_BCHW.dtype, torch.float32)), (0, 2, 3), correction=0
        )
        return mean_C, var_C
    blocks = _blocks(x_BCHW)
    means_KC, vars_KC = (each.view(-1, x_BCHW.shape[1]) for each in internals.channel_statistics(blocks))
    mean_C = means_KC.mean(0, dtype=torch.float64)
    return mean_C, (vars_KC + (means_KC - mean_C).square()).mean(0)


def _gradient_sums(dy_BCHW: Tensor, x_BCHW: Tensor, mean_C: Tensor, inverse_C: Tensor) -> Tensor:
    """Return the sums of dy and of dy * xhat over this rank's pixels, shape (2, C)."""
    if x_BCHW.device.type != "cpu":
        dy = dy_BCHW.to(mean_C.dtype)
        xhat = (x_BCHW.to(mean_C.dtype) - mean_C.view(1, -1, 1, 1)).mul_(inverse_C.view(1, -1, 1, 1))
        return torch.stack([dy.sum((0, 2, 3)), (dy * xhat).sum((0, 2, 3))])
    channels, compute_dtype = len(mean_C), torch.promote_types(x_BCHW.dtype, torch.float32)
    x, dy = _blocks(x_BCHW), _blocks(dy_BCHW)
    mean, inverse = (each_C.to(compute_dtype).repeat(x.shape[1] // channels) for each_C in (mean_C, inverse_C))
    sums = internals.channel_gradient_sums(dy, x, mean, inverse)
    return torch.stack([each.view(-1, channels).sum(0, dtype=torch.float64) for each in sums])


def _is_channels_last(x: Tensor) -> bool:
    """Return whether ``x`` is channels last only; with one channel or one pixel a tensor is contiguous as well."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _blocks(x_BCHW: Tensor) -> Tensor:
    """View the same memory in a shape for which torch's kernel adds at most ``BLOCK`` pixels in a row.

    Channels-last memory is (P, C). Viewed as (P / K, K * C), the sums of its K * C columns are the sums over K blocks
    of pixels. For a contiguous tensor torch's kernel is exact, so such a tensor is returned unchanged.
    """
    if not _is_channels_last(x_BCHW):
        return x_BCHW
    channels = x_BCHW.shape[1]
    pixels = x_BCHW.numel() // channels
    columns = _block_count(pixels) * channels
    size, stride = (1, columns, x_BCHW.numel() // columns, 1), (x_BCHW.numel(), 1, columns, columns)
    return x_BCHW.as_strided(size, stride)


@cache
def _block_count(pixels: int) -> int:
    """Return the smallest number of equal blocks that are no longer than ``BLOCK``."""
    fewest = -(-pixels // BLOCK)
    return next(count for count in range(fewest, pixels + 1) if pixels % count == 0)
