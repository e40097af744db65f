"""Convolutions that fix the memory layout of a model, channels last or contiguous, for inputs of any layout."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.backends._torch import internals
from mtrain.backends._torch.convolution import KernelConv2d
from mtrain.backends._torch.quantising import Arrangement, QuantisedConv2d
from mtrain.core.overriding import override


class ChannelsLastConv2d(nn.Conv2d):
    """A Conv2d that converts its weight to channels last on each call.

    It is for backends such as ZeRO-3 that store weights contiguously. Its results equal those of
    ``engine.channels_last``.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        return internals.convolve(self, input, channels_last(self.weight))


class ContiguousConv2d(nn.Conv2d):
    """A Conv2d that makes its input contiguous.

    Images arrive channels last, and torch keeps the layout of its input from layer to layer. So the first convolution
    copies the images, and every later input is contiguous already.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        if self.kernel_size == (1, 1) and self.padding_mode == "zeros":
            # In this layout torch's own choice of a kernel is the faster one; see ``avoid_slow_kernels``.
            return F.conv2d(input.contiguous(), self.weight, self.bias, self.stride, self.padding, 1, self.groups)
        return internals.convolve(self, input.contiguous(), self.weight)


def use_channels_last(model: nn.Module) -> None:
    """Make every Conv2d of ``model`` compute with a channels-last weight, in place."""
    use(ChannelsLastConv2d, model)


def use(kind: type[nn.Conv2d], model: nn.Module) -> None:
    """Make every Conv2d of ``model`` a ``kind``, in place; ``nn.Conv2d`` keeps the layout of inputs and weights."""
    for module in model.modules():
        if isinstance(module, QuantisedConv2d):
            module.arrange = ARRANGEMENTS.get(kind)
        elif type(module) in (nn.Conv2d, ChannelsLastConv2d, ContiguousConv2d, KernelConv2d):
            cast(Any, module).__class__ = kind


def avoid_slow_kernels(model: nn.Module) -> None:
    """Make the 1x1 convolutions of ``model`` use oneDNN in channels-last layout on the CPU, in place.

    With one thread and fewer than 16 images torch computes them as matrix products of single images, whose backward
    pass takes up to twice as long. Dilated convolutions always use oneDNN, and dilation, the distance of a kernel's
    points, means nothing for a kernel of one point.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.dilation = (2, 2)


ARRANGEMENTS: Mapping[type[nn.Conv2d], Arrangement] = {
    ChannelsLastConv2d: lambda x, weight: (x, channels_last(weight)),
    ContiguousConv2d: lambda x, weight: (x.contiguous(), weight),
}
"""The same for convolutions that round: (input, weight) in the layout of each kind."""


def channels_last(weight_OIHW: Tensor) -> Tensor:
    """Return the weight with the strides that ``engine.channels_last`` gives it; a copy unless H = W = 1."""
    outs, ins, height, width = weight_OIHW.shape
    if (height, width) == (1, 1):
        return weight_OIHW.reshape(outs, ins).view(outs, 1, 1, ins).permute(0, 3, 1, 2)
    return weight_OIHW.contiguous(memory_format=torch.channels_last)
