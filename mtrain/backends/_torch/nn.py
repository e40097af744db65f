"""The neutral layers on torch. ``core/nn.pyi`` is their contract; torch's own class is used where it fulfils it."""

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import (  # noqa: F401 - the layers that torch has as the contract wants them
    GELU,
    Conv2d,
    ConvTranspose2d,
    Embedding,
    GroupNorm,
    Identity,
    LayerNorm,
    Linear,
    MaxPool2d,
    Module,
    ModuleList,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
    Upsample,
)
from torch.nn import functional as F

from mtrain.backends._torch import batchnorm, dropout, kernels, state
from mtrain.backends._torch.collective import TorchCollective
from mtrain.core.interfaces import Array
from mtrain.core.network import noise
from mtrain.core.overriding import override

no_grad = torch.no_grad


class BatchNorm2d(torch.nn.BatchNorm2d):
    """torch's BatchNorm2d with exact statistics in every memory layout, and a choice of variance estimate.

    With ``unbiased_variance`` the running variance follows the sum of squares divided by (count - 1), as torch has it;
    without, divided by count.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float
    silu: bool = False
    kernels: bool = False
    """Whether to use mtrain's own kernels where they fit; ``syncbn.use_kernels`` sets it."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        unbiased_variance: bool = True,
        silu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum)
        self.unbiased_variance = unbiased_variance
        self.silu = silu

    @override
    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.kernels and kernels.fit(input, self.weight):
            return self.normalize_batch(input)
        output = self._normalize_by_torch(input)
        return F.silu(output) if self.silu else output

    def _normalize_by_torch(self, input: Tensor) -> Tensor:
        """Normalise without SiLU, by torch's kernels."""
        if self.training and batchnorm.needs_blocks(input):
            return self.follow_statistics(*batchnorm.normalize(input, self.weight, self.bias, eps=self.eps))
        if self.unbiased_variance or not self.training:
            return super().forward(input)
        # The kernel gets scratch statistics: autograd saves the ones passed to it and forbids changing them afterwards.
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = F.batch_norm(input, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        count = input.numel() // input.shape[1]
        self._follow(mean, var * ((count - 1) / count))
        return output

    def normalize_batch(self, input: Tensor, collective: TorchCollective | None = None) -> Tensor:
        """Normalise, and apply SiLU if it is part of the layer, with the statistics of ``input``.

        They are those of all ranks with ``collective``. Updates the running statistics.
        """
        weight, bias, eps = self.weight, self.bias, self.eps
        if self.kernels and kernels.fit(input, weight):
            return self.follow_statistics(
                *kernels.normalize(
                    input,
                    weight,
                    bias,
                    eps=eps,
                    silu=self.silu,
                    collective=collective,
                )
            )
        output = self.follow_statistics(*batchnorm.normalize(input, weight, bias, eps=eps, collective=collective))
        return F.silu(output) if self.silu else output

    def follow_statistics(self, output: Tensor, mean: Tensor, var: Tensor, count: Tensor) -> Tensor:
        """Update the running statistics, and return ``output``."""
        self._follow(mean, var * (count / (count - 1)) if self.unbiased_variance else var)
        return output

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics towards those of a micro batch by ``momentum``."""
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(var.to(self.running_var.dtype), self.momentum)
        self.num_batches_tracked.add_(1)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, unbiased_variance={self.unbiased_variance}, silu={self.silu}"


class Dropout(Module):
    """See ``core/nn.pyi``; the words are those of ``core.network.noise``, computed with int32, which wraps around as uint32 does."""

    def __init__(self, p: float = 0.5, *, name: str) -> None:
        super().__init__()
        self.p = p
        self.code = noise.sign(noise.layer_code(name))

    @override
    def forward(self, x: Tensor, random_key: Tensor | None = None) -> Tensor:
        if not self.training or self.p == 0:
            return x
        noise.check_key(x, random_key)
        assert random_key is not None
        if not dropout.fits(x):
            return x * self.mask(x, random_key)
        return cast(Tensor, dropout.Function.apply(x, random_key, self))

    def mask(self, x: Tensor, random_key: Tensor) -> Tensor:
        """Return what ``x`` is multiplied by, computed with tensors."""
        places = _mix(torch.arange(x[0].numel(), dtype=torch.int32, device=x.device))
        words = _mix(places ^ _mix(random_key ^ self.code)[:, None]).bitwise_and_(noise.RANGE - 1)
        return (words >= noise.threshold(self.p)).view(x.shape).to(x.dtype).mul_(1 / (1 - self.p))

    @override
    def extra_repr(self) -> str:
        return f"p={self.p}"


def _mix(x: Tensor) -> Tensor:
    """Apply ``noise.mix`` to words as int32, in place."""
    for shift, factor in noise.ROUNDS:
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> noise.LAST_SHIFT).bitwise_and_((1 << (32 - noise.LAST_SHIFT)) - 1))


def parameter(shape: tuple[int, ...], *, fill: float = 0.0) -> torch.nn.Parameter:
    """See ``core/nn.pyi``."""
    return torch.nn.Parameter(torch.full(shape, fill))


def buffer(module: Module, name: str, array: Array, *, persistent: bool = True) -> None:
    """See ``core/nn.pyi``."""
    module.register_buffer(name, torch.tensor(np.asarray(array)), persistent=persistent)


def frozen(module: Module, values: Callable[[Mapping[str, Array]], Mapping[str, Array]], *, like: Module) -> Module:
    """See ``core/nn.pyi``."""
    sample = next(like.parameters())
    module.to(device=sample.device, dtype=sample.dtype)
    state.fill(module.state_dict(), values(state.arrays(module)), what="the weights")
    return module.requires_grad_(requires_grad=False).eval()
