"""Weights channels last where they are used, under libraries that keep them in the order of their axes."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override


class ChannelsLastConv2d(nn.Conv2d):
    """A Conv2d whose weight is laid out channels last for each call. Values are those of ``engine.channels_last``."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, channels_last(self.weight), self.bias)


def use_channels_last(model: nn.Module) -> None:
    """Make every Conv2d of ``model`` compute as one whose weight lies channels last, in place."""
    for module in model.modules():
        if type(module) is nn.Conv2d:
            cast(Any, module).__class__ = ChannelsLastConv2d


def channels_last(weight_OIHW: Tensor) -> Tensor:
    """The same values with the strides that ``engine.channels_last`` gives a weight; a copy unless H = W = 1."""
    outs, ins, height, width = weight_OIHW.shape
    if (height, width) == (1, 1):
        return weight_OIHW.reshape(outs, ins).view(outs, 1, 1, ins).permute(0, 3, 1, 2)
    return weight_OIHW.contiguous(memory_format=torch.channels_last)
