"""Convolutions that settle the memory layout of a model: channels last, or contiguous, whatever their input has."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override


class ChannelsLastConv2d(nn.Conv2d):
    """A Conv2d whose weight is laid out channels last for each call. Values are those of ``engine.channels_last``.

    For backends such as ZeRO-3 that store weights contiguous.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, channels_last(self.weight), self.bias)


class ContiguousConv2d(nn.Conv2d):
    """A Conv2d that works on contiguous memory.

    Pictures arrive channels last, and torch keeps the layout of its input from layer to layer. The first convolution copies
    the pictures; behind it everything is contiguous already.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input.contiguous(), self.weight, self.bias)


def use_channels_last(model: nn.Module) -> None:
    """Make every Conv2d of ``model`` compute as one whose weight lies channels last, in place."""
    use(ChannelsLastConv2d, model)


def use(kind: type[nn.Conv2d], model: nn.Module) -> None:
    """Make every Conv2d of ``model`` one of ``kind``, in place; ``nn.Conv2d``: keep the layout that inputs and weights have."""
    for module in model.modules():
        if type(module) in (nn.Conv2d, ChannelsLastConv2d, ContiguousConv2d):
            cast(Any, module).__class__ = kind


def channels_last(weight_OIHW: Tensor) -> Tensor:
    """The same values with the strides that ``engine.channels_last`` gives a weight; a copy unless H = W = 1."""
    outs, ins, height, width = weight_OIHW.shape
    if (height, width) == (1, 1):
        return weight_OIHW.reshape(outs, ins).view(outs, 1, 1, ins).permute(0, 3, 1, 2)
    return weight_OIHW.contiguous(memory_format=torch.channels_last)
