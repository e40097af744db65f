"""BatchNorm over the micro batches of all ranks, on any device that paddle.distributed reaches, CPU included."""

from typing import Any, cast

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.nn import Layer

from mtrain.backends._paddle.collective import PaddleCollective
from mtrain.backends._paddle.kernels import refuse_second_gradient
from mtrain.backends._paddle.nn import BatchNorm2d
from mtrain.core.overriding import override
from mtrain.errors import SpecError

NATIVE = (paddle.nn.BatchNorm1D, paddle.nn.BatchNorm2D, paddle.nn.BatchNorm3D, paddle.nn.BatchNorm)
# Legend: B batch, C channels, H, W; R ranks.
_REDUCED = (0, 2, 3)


@paddle.no_grad()
def statistics(x_BCHW: Tensor, collective: PaddleCollective) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mean (C), biased variance (C) and count (scalar) over all ranks' micro batches; every rank must call.

    Ranks exchange (mean, variance, count), merged as in Chan et al. 1979, which loses nothing to cancellation.
    """
    channels = x_BCHW.shape[1]
    x = _wide(x_BCHW)
    mean_C = paddle.mean(x, _REDUCED)
    var_C = paddle.mean(paddle.square(x - _planes(mean_C)), _REDUCED)
    count = paddle.full([1], x.size // channels, x.dtype)
    gathered = collective.all_gather_tensor(paddle.concat([mean_C, var_C, count]))
    means_RC, vars_RC, counts_R1 = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
    total = counts_R1.sum()
    mean_C = (means_RC * counts_R1).sum(0) / total
    var_C = ((vars_RC + paddle.square(means_RC - mean_C)) * counts_R1).sum(0) / total
    return mean_C, var_C, total


class _Normalize(PyLayer):
    """Autograd function for y = (x - mean) * inverse * weight + bias.

    mean and inverse = 1 / sqrt(var + eps) are over all ranks. The ranks exchange two sums in the backward pass. The
    statistics are inputs that take no gradient instead of outputs without one, on which Paddle 2.6 crashes.
    """

    @staticmethod
    def forward(ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, *fixed: Tensor, **ranks: Any) -> Tensor:
        mean_C, inverse_C, _ = fixed
        scale_C = weight_C.astype(mean_C.dtype) * inverse_C
        shift_C = bias_C.astype(mean_C.dtype) - mean_C * scale_C
        ctx.save_for_backward(x_BCHW, weight_C, *fixed)
        ctx.collective = ranks["collective"]
        ctx.needs_gradient = [not tensor.stop_gradient for tensor in (x_BCHW, weight_C, bias_C)]
        return (_wide(x_BCHW) * _planes(scale_C) + _planes(shift_C)).astype(x_BCHW.dtype)

    @staticmethod
    def backward(ctx: Any, dy_BCHW: Tensor) -> Any:
        refuse_second_gradient("train.sync_batchnorm: false")
        x_BCHW, weight_C, mean_C, inverse_C, total = ctx.saved_tensor()
        dy = dy_BCHW.astype(mean_C.dtype)
        xhat = (x_BCHW.astype(mean_C.dtype) - _planes(mean_C)) * _planes(inverse_C)
        sums_2C = paddle.stack([dy.sum(_REDUCED), (dy * xhat).sum(_REDUCED)])
        # The gradients of weight and bias stay local: the exchange of gradients averages them like all others.
        grad_bias, grad_weight = sums_2C.astype(weight_C.dtype).unbind(0)
        mean_dy_C, mean_dy_xhat_C = (ctx.collective.all_reduce(sums_2C, "sum") / total).unbind(0)
        scale_C = weight_C.astype(mean_C.dtype) * inverse_C
        dx = (dy - _planes(mean_dy_C) - xhat * _planes(mean_dy_xhat_C)) * _planes(scale_C)
        grads = (dx.astype(x_BCHW.dtype), grad_weight, grad_bias)
        # For an input that needs no gradient, Paddle accepts only None.
        variables = [grad if needed else None for grad, needed in zip(grads, ctx.needs_gradient, strict=True)]
        return *variables, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.astype("float32") if x.dtype in (paddle.float16, paddle.bfloat16) else x


def _planes(x_C: Tensor) -> Tensor:
    return x_C.reshape([1, -1, 1, 1])


class SyncBatchNorm2d(BatchNorm2d):
    """A BatchNorm2d over the micro batches of all ranks; ``synchronize`` makes it.

    Names and state stay as they were.
    """

    collective: PaddleCollective

    @override
    def normalize_batch(self, x_BCHW: Tensor) -> Tensor:
        if not self.training:
            return super().normalize_batch(x_BCHW)
        mean_C, var_C, total = statistics(x_BCHW, self.collective)
        with paddle.no_grad():
            inverse_C = paddle.rsqrt(var_C + paddle.full([1], self.eps, var_C.dtype))
            self.num_batches_tracked.add_(paddle.ones_like(self.num_batches_tracked))
            batch_C = var_C * (total / (total - 1)) if self.unbiased_variance else var_C
            self.running_mean.scale_(1 - self.momentum).add_(mean_C.astype(self.running_mean.dtype) * self.momentum)
            self.running_var.scale_(1 - self.momentum).add_(batch_C.astype(self.running_var.dtype) * self.momentum)
        variables = (x_BCHW, self.weight, self.bias)
        return cast(Tensor, _Normalize.apply(*variables, mean_C, inverse_C, total, collective=self.collective))


class FrozenBatchNorm2d(BatchNorm2d):
    """A BatchNorm2d with a frozen weight, which uses its running statistics in training mode too."""

    @property
    def training(self) -> bool:
        """Always False. Paddle sets the mode of a layer through this attribute; the setter ignores it."""
        return False

    @training.setter
    def training(self, mode: bool) -> None: ...


def synchronize(model: Layer, collective: PaddleCollective) -> None:
    """Make every trainable BatchNorm2d of ``model`` take its statistics over all ranks, in place.

    Raises:
        SpecError: there is one of Paddle's own, which on the CPU has no form over ranks.
    """
    for name, module in model.named_sublayers(include_self=True):
        if isinstance(module, NATIVE):
            raise SpecError(
                f"train.sync_batchnorm: true given, but {name or 'the model'} is Paddle's own {type(module).__name__}, which "
                "mtrain cannot synchronise; use false"
            )
        if isinstance(module, BatchNorm2d) and not isinstance(module, FrozenBatchNorm2d):
            module.__class__ = SyncBatchNorm2d
            cast(SyncBatchNorm2d, module).collective = collective


def use_kernels(model: Layer) -> None:
    """Make every BatchNorm2d of ``model`` use mtrain's own kernels where they fit, in place; they can be loaded here.

    Not over ranks: there the statistics are exchanged between the two passes that the kernels do as one.
    """
    for module in model.sublayers(include_self=True):
        if isinstance(module, BatchNorm2d) and not isinstance(module, SyncBatchNorm2d):
            module.kernels = True


def freeze(model: Layer) -> None:
    """Make every BatchNorm2d of ``model`` whose weight takes no gradient keep its running statistics, in place."""
    for module in model.sublayers(include_self=True):
        if isinstance(module, BatchNorm2d) and module.weight.stop_gradient:
            module.__class__ = FrozenBatchNorm2d
