"""BatchNorm over the micro batches of all ranks, on any device that torch.distributed reaches, CPU included."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from mtrain.backends._torch.collective import TorchCollective

# Legend: B batch, C channels, H, W; R ranks.
_REDUCED = (0, 2, 3)


class _Normalize(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias with mean and var over all ranks.

    Ranks exchange (mean, variance, count) forward, merged as in Chan et al. 1979, which loses nothing to cancellation,
    and two sums backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, collective: TorchCollective
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x_BCHW.dtype, torch.float32)
        x = x_BCHW.to(wide)
        var_C, mean_C = torch.var_mean(x, dim=_REDUCED, correction=0)
        count = x.new_tensor([x.numel() // x.shape[1]])
        everyone = collective.all_gather_tensor(torch.cat([mean_C, var_C, count]))
        means_RC, vars_RC = everyone[:, : x.shape[1]], everyone[:, x.shape[1] : -1]
        counts_R1 = everyone[:, -1:]
        total = counts_R1.sum()
        mean_C = (means_RC * counts_R1).sum(0) / total
        var_C = ((vars_RC + (means_RC - mean_C).square()) * counts_R1).sum(0) / total
        inverse_C = torch.rsqrt(var_C + eps)
        scale_C = weight_C.to(wide) * inverse_C
        shift_C = bias_C.to(wide) - mean_C * scale_C
        y = torch.addcmul(shift_C.view(1, -1, 1, 1), x, scale_C.view(1, -1, 1, 1)).to(x_BCHW.dtype)
        ctx.save_for_backward(x_BCHW, weight_C, mean_C, inverse_C, total)
        ctx.collective = collective
        ctx.mark_non_differentiable(mean_C, var_C, total)
        return y, mean_C, var_C, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BCHW, weight_C, mean_C, inverse_C, total = ctx.saved_tensors
        dy = grads[0].to(mean_C.dtype)
        xhat = (x_BCHW.to(mean_C.dtype) - mean_C.view(1, -1, 1, 1)).mul_(inverse_C.view(1, -1, 1, 1))
        sums_2C = torch.stack([dy.sum(_REDUCED), (dy * xhat).sum(_REDUCED)])
        # The gradients of weight and bias stay local: the exchange of gradients averages them like all others.
        grad_bias, grad_weight = sums_2C.to(weight_C.dtype).unbind(0)
        mean_dy_C, mean_dy_xhat_C = (ctx.collective.all_reduce(sums_2C, "sum") / total).unbind(0)
        scale_C = weight_C.to(mean_C.dtype) * inverse_C
        inner = (dy - mean_dy_C.view(1, -1, 1, 1)).sub_(xhat.mul_(mean_dy_xhat_C.view(1, -1, 1, 1)))
        dx = inner.mul_(scale_C.view(1, -1, 1, 1)).to(x_BCHW.dtype)
        return dx, grad_weight, grad_bias, None, None


class SyncBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d that was told of the other ranks by ``synchronize``; names and state stay as they were."""

    collective: TorchCollective
    unbiased_variance: bool

    @override
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        y, mean_C, var_C, total = _Normalize.apply(input, self.weight, self.bias, self.eps, self.collective)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            running_C = var_C * (total / (total - 1)) if self.unbiased_variance else var_C
            self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(running_C.to(self.running_var.dtype), self.momentum)
        return cast(Tensor, y)


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d whose weight is frozen: it stays with its running statistics in training mode."""

    @override
    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        super().train(False)  # noqa: FBT003
        return self


def synchronize(model: nn.Module, collective: TorchCollective) -> None:
    """Make every trainable BatchNorm2d of ``model`` take its statistics over all ranks, in place."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not isinstance(module, FrozenBatchNorm2d):
            unbiased = getattr(module, "unbiased_variance", True)
            module.__class__ = SyncBatchNorm2d
            synced = cast(SyncBatchNorm2d, module)
            synced.unbiased_variance = unbiased
            synced.collective = collective


def freeze(model: nn.Module) -> None:
    """Make every BatchNorm2d of ``model`` whose weight takes no gradient keep its running statistics, in place."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.weight is not None and not module.weight.requires_grad:
            module.__class__ = FrozenBatchNorm2d
            module.eval()
