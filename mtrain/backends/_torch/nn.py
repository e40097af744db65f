"""The neutral layers in torch; ``core/nn.pyi`` is the contract. A native class that keeps it is the neutral one."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import (
    GELU,
    Conv2d,
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
from typing_extensions import override

from mtrain.core.interfaces import Array

__all__ = [
    "GELU",
    "BatchNorm2d",
    "Conv2d",
    "Identity",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Upsample",
    "buffer",
    "no_grad",
    "parameter",
]

no_grad = torch.no_grad


class BatchNorm2d(torch.nn.BatchNorm2d):
    """torch's, with the estimate that the running variance takes as an argument."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, *, unbiased_variance: bool = True
    ) -> None:
        super().__init__(num_features, eps, momentum)
        self.unbiased_variance = unbiased_variance

    @override
    def forward(self, input: Tensor) -> Tensor:
        if self.unbiased_variance or not self.training:
            return super().forward(input)
        # Statistics of their own for the kernel: autograd keeps those that it is given, and lets nobody change them afterwards.
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = F.batch_norm(input, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        count = input.numel() // input.shape[1]
        with torch.no_grad():
            kept = 1 - self.momentum
            self.running_mean.mul_(kept).add_(mean, alpha=self.momentum)
            self.running_var.mul_(kept).add_(var, alpha=self.momentum * (count - 1) / count)
            self.num_batches_tracked.add_(1)
        return output

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, unbiased_variance={self.unbiased_variance}"


def parameter(shape: tuple[int, ...], *, fill: float = 0.0) -> torch.nn.Parameter:
    """See ``core/nn.pyi``."""
    return torch.nn.Parameter(torch.full(shape, fill))


def buffer(module: Module, name: str, array: Array, *, persistent: bool = True) -> None:
    """See ``core/nn.pyi``."""
    module.register_buffer(name, torch.tensor(np.asarray(array)), persistent=persistent)
