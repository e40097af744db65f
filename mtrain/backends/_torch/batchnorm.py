"""BatchNorm for training: statistics that are exact to rounding in every memory layout, of one rank or of all ranks.

torch's kernel for channels-last tensors on the CPU adds up all pixels of a channel one after the other in float32, which is up to
four digits less exact than its kernel for contiguous tensors (docs/accuracy.md has figures and a script). The functions here give
that kernel blocks of a few hundred pixels each and join the blocks' sums in float64.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain.backends._torch.collective import LocalCollective, TorchCollective

# Legend: B batch, C channels, H, W; P pixels of all pictures (B * H * W); K blocks of pixels; R ranks.
BLOCK = 256
"""Most pixels that are added one after the other. Up to this many torch's own kernel is exact enough."""


def needs_blocks(x_BCHW: Tensor) -> bool:
    """Whether torch's own kernel would be inexact for this input in training."""
    return x_BCHW.device.type == "cpu" and x_BCHW.numel() > BLOCK * x_BCHW.shape[1] and _is_channels_last(x_BCHW)


def normalize(
    x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, *, eps: float, collective: TorchCollective | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise with the statistics of this micro batch, over all ranks where ``collective`` is given.

    Returns:
        The output, then without gradient: mean (C,), variance (C,) divided by the count, and the count of pixels (0-d).
    """
    found = _Normalize.apply(x_BCHW, weight_C, bias_C, eps, collective or LocalCollective())
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], found)


class _Normalize(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias.

    With several ranks they exchange (mean, variance, count) forward, merged as in Chan et al. 1979, which loses nothing to
    cancellation, and two sums backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, collective: TorchCollective
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_BCHW = x_BCHW if _is_channels_last(x_BCHW) else x_BCHW.contiguous()
        mean_C, var_C = _statistics(x_BCHW)
        total = mean_C.new_tensor(x_BCHW.numel() // x_BCHW.shape[1])
        if collective.size > 1:
            mean_C, var_C, total = _of_all_ranks(mean_C, var_C, total, collective)
        inverse_C = torch.rsqrt(var_C + eps)
        kept = torch.promote_types(x_BCHW.dtype, torch.float32)
        y = F.batch_norm(x_BCHW, mean_C.to(kept), var_C.to(kept), weight_C, bias_C, training=False, eps=eps)
        ctx.save_for_backward(x_BCHW, weight_C, mean_C, inverse_C, total)
        ctx.collective = collective
        ctx.mark_non_differentiable(mean_C, var_C, total)
        return y, mean_C, var_C, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BCHW, weight_C, mean_C, inverse_C, total = ctx.saved_tensors
        layout = torch.channels_last if _is_channels_last(x_BCHW) else torch.contiguous_format
        dy_BCHW = grads[0].contiguous(memory_format=layout)
        sums_2C = _gradient_sums(dy_BCHW, x_BCHW, mean_C, inverse_C)
        # The gradients of weight and bias stay local: the exchange of gradients averages them like all others.
        grad_bias, grad_weight = sums_2C.to(weight_C.dtype).unbind(0)
        if ctx.collective.size > 1:
            sums_2C = ctx.collective.all_reduce(sums_2C, "sum")
        mean_dy_C, mean_dy_xhat_C = (sums_2C / total).unbind(0)
        # dx = (dy - mean(dy) - xhat * mean(dy * xhat)) * weight / sqrt(var + eps), with what is known per channel put together.
        of_dy_C = weight_C * inverse_C
        of_x_C = of_dy_C * inverse_C * mean_dy_xhat_C
        rest_C = of_x_C * mean_C - of_dy_C * mean_dy_C
        kept = torch.promote_types(x_BCHW.dtype, torch.float32)
        of_dy, of_x, rest = torch.stack([of_dy_C, of_x_C, rest_C]).to(kept).view(3, 1, -1, 1, 1).unbind(0)
        dx_BCHW = torch.addcmul(rest, x_BCHW, of_x, value=-1).addcmul_(dy_BCHW, of_dy)
        return dx_BCHW.to(x_BCHW.dtype), grad_weight, grad_bias, None, None


def _of_all_ranks(
    mean_C: Tensor, var_C: Tensor, count: Tensor, collective: TorchCollective
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count of the pixels of all ranks."""
    channels = len(mean_C)
    everyone = collective.all_gather_tensor(torch.cat([mean_C, var_C, count.view(1)]))
    means_RC, vars_RC, counts_R1 = everyone.split([channels, channels, 1], dim=1)
    total = counts_R1.sum()
    mean_C = (means_RC * counts_R1).sum(0) / total
    return mean_C, ((vars_RC + (means_RC - mean_C).square()) * counts_R1).sum(0) / total, total


def _statistics(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel; float64 on the CPU."""
    if x_BCHW.device.type != "cpu":
        var_C, mean_C = torch.var_mean(
            x_BCHW.to(torch.promote_types(x_BCHW.dtype, torch.float32)), (0, 2, 3), correction=0
        )
        return mean_C, var_C
    blocks = _blocks(x_BCHW)
    # Running statistics that nobody reads: with them half precision gets statistics in float32.
    unread = x_BCHW.new_zeros(blocks.shape[1], dtype=torch.promote_types(x_BCHW.dtype, torch.float32))
    means, variances = torch.batch_norm_update_stats(blocks, unread, unread.clone(), 0.0)
    means_KC, vars_KC = (each.view(-1, x_BCHW.shape[1]) for each in (means, variances))
    mean_C = means_KC.mean(0, dtype=torch.float64)
    return mean_C, (vars_KC + (means_KC - mean_C).square()).mean(0)


def _gradient_sums(dy_BCHW: Tensor, x_BCHW: Tensor, mean_C: Tensor, inverse_C: Tensor) -> Tensor:
    """(2, C): the sums of dy and of dy * xhat over this rank's pixels."""
    if x_BCHW.device.type != "cpu":
        dy = dy_BCHW.to(mean_C.dtype)
        xhat = (x_BCHW.to(mean_C.dtype) - mean_C.view(1, -1, 1, 1)).mul_(inverse_C.view(1, -1, 1, 1))
        return torch.stack([dy.sum((0, 2, 3)), (dy * xhat).sum((0, 2, 3))])
    channels, kept = len(mean_C), torch.promote_types(x_BCHW.dtype, torch.float32)
    x, dy = _blocks(x_BCHW), _blocks(dy_BCHW)
    mean, inverse = (each_C.to(kept).repeat(x.shape[1] // channels) for each_C in (mean_C, inverse_C))
    # The kernel gives the sums as gradients of bias and weight; the gradient of the input is not asked for.
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, None, None, mean, inverse, train=True, eps=0.0, output_mask=[False, True, True]
    )
    return torch.stack([each.view(-1, channels).sum(0, dtype=torch.float64) for each in (of_bias, of_weight)])


def _is_channels_last(x: Tensor) -> bool:
    """Without those that are contiguous too, because they have one channel or one pixel."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _blocks(x_BCHW: Tensor) -> Tensor:
    """The same memory, seen so that torch's kernel adds no more than ``BLOCK`` pixels in a row.

    Channels-last memory is (P, C). Read as (P / K, K * C), its K * C columns are the sums over K blocks of pixels. In a
    contiguous tensor torch's kernel is exact by itself, so that is returned as it is.
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
    """The smallest number of equal blocks that are no longer than ``BLOCK``."""
    fewest = -(-pixels // BLOCK)
    return next(count for count in range(fewest, pixels + 1) if pixels % count == 0)
