"""The real-time network on the bound framework. Import it only where a framework is bound.

Architecture: Peng et al. 2022, PP-LiteSeg (arXiv 2204.02681), figure 2: an STDC encoder, pyramid pooling, and a decoder
whose channels become fewer as its maps become larger. Shape letters: B batch, S side of the input, C channels or classes, H
and W of a feature map.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtrain.core import nn, ops
from mtrain.core.interfaces import Array, Batch, Collective, Tensor
from mtrain.models.common.imitation import Imitator, Signals
from mtrain.models.common.pixel_losses import losses
from mtrain.models.common.pixels import normalise, predict_classes, wide
from mtrain.models.liteseg.options import LiteSegOptions


class Network(Imitator):
    """The network with its loss. It returns losses in training, ``classes`` and ``certainty`` (B, S, S) in evaluation."""

    classifier: Any
    auxiliary: Any

    def __init__(self, options: LiteSegOptions, *, class_count: int, collective: Collective) -> None:
        super().__init__()
        self.options, self.collective = options, collective
        width = options.width
        self.stem = nn.Sequential(ConvUnit(3, width // 2, 3, 2), ConvUnit(width // 2, width, 3, 2))
        widths = (width, 4 * width, 8 * width, 16 * width)
        self.stages = nn.ModuleList([_stage(a, b, options.blocks) for a, b in itertools.pairwise(widths)])
        at_8, at_16, at_32 = options.decoder
        self.pooling = PyramidPooling(widths[3], at_32)
        self.fuse_16 = AttentionFusion(widths[2], at_32, at_16)
        self.fuse_8 = AttentionFusion(widths[1], at_16, at_8)
        self.head = ConvUnit(at_8, at_8)
        self.classifier = nn.Conv2d(at_8, class_count, 1)
        if options.auxiliary:
            self.auxiliary = nn.Conv2d(at_16, class_count, 1)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the losses in training, see ``pixel_losses.losses``; predictions in evaluation.

        Args:
            batch: ``pixels`` uint8 (B, S, S, 4), RGB and class.
        """
        options = self.options
        x_B3SS = self.as_input(batch)
        features_BCHW, coarse_BCHW = self.features(x_B3SS)
        size = ops.shape(x_B3SS)[2:]
        logits_BCSS = ops.resize_bilinear(wide(self.classifier(features_BCHW)), size)
        if not self.training:
            return predict_classes(logits_BCSS)
        found = losses(
            logits_BCSS,
            batch,
            options=options,
            collective=self.collective,
            auxiliary_BCSS=ops.resize_bilinear(wide(self.auxiliary(coarse_BCHW)), size) if options.auxiliary else None,
            auxiliary_weight=options.auxiliary,
        )
        return self.taught(found, batch, lambda: Signals(logits=logits_BCSS))

    def as_input(self, batch: Batch) -> Tensor:
        """Return the normalised pixels of a micro batch, (B, 3, S, S)."""
        options, dtype = self.options, ops.dtype(self.classifier.weight)
        return normalise(batch["pixels"][:, :, :, :3], mean=options.mean, std=options.std, dtype=dtype)

    def signals(self, batch: Batch) -> Signals:
        """Show the class logits of each pixel (B, C, S, S)."""
        x_B3SS = self.as_input(batch)
        return Signals(logits=ops.resize_bilinear(wide(self.logits(x_B3SS)), ops.shape(x_B3SS)[2:]))

    def raw(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``logits`` (B, C, S, S) of the classes of each pixel."""
        return {"logits": self.signals(batch).logits}

    def logits(self, x_B3SS: Tensor) -> Tensor:
        """Compute the class logits (B, C, S / 8, S / 8) from normalised pixels (B, 3, S, S)."""
        return self.classifier(self.features(x_B3SS)[0])

    def features(self, x_B3SS: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the decoder's maps at an eighth and at a sixteenth of the size."""
        x_BCHW, maps = self.stem(x_B3SS), []
        for stage in self.stages:
            x_BCHW = stage(x_BCHW)
            maps.append(x_BCHW)
        coarse_BCHW = self.fuse_16(maps[1], self.pooling(maps[2]))
        return self.head(self.fuse_8(maps[0], coarse_BCHW)), coarse_BCHW


def _stage(in_channels: int, channels: int, blocks: int) -> nn.Sequential:
    """Make the modules of one size; the first one halves it."""
    rest = [STDC(channels, channels, 1) for _ in range(blocks - 1)]
    return nn.Sequential(STDC(in_channels, channels, 2), *rest)


# Shape letters: B batch, C channels, H and W of a feature map, G bins along a side.
class ConvUnit(nn.Module):
    """A convolution with BatchNorm and, unless ``active`` is false, ReLU."""

    def __init__(
        self, in_channels: int, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1, *, active: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.active = active

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, channels, H / stride, W / stride)."""
        y_BCHW = self.bn(self.conv(x_BCHW))
        return ops.relu(y_BCHW) if self.active else y_BCHW


class STDC(nn.Module):
    """The short-term dense concatenate module: Fan et al. 2021, figure 3.

    Four convolutions in a row, each with half as many channels as the one before (the last two equally many); all four
    outputs are joined. With stride 2 a depthwise convolution halves the size after the first one, whose own output is
    averaged to the same size.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        half, quarter, eighth = channels // 2, channels // 4, channels // 8
        self.stride = stride
        self.conv1 = ConvUnit(in_channels, half, 1)
        if stride == 2:
            self.halve = ConvUnit(half, half, 3, 2, half, active=False)
        self.conv2 = ConvUnit(half, quarter)
        self.conv3 = ConvUnit(quarter, eighth)
        self.conv4 = ConvUnit(eighth, eighth)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, channels, H / stride, W / stride)."""
        first = self.conv1(x_BCHW)
        second = self.conv2(self.halve(first) if self.stride == 2 else first)
        third = self.conv3(second)
        fourth = self.conv4(third)
        return ops.concat(
            (ops.avg_pool2d(first, 3, 2, 1) if self.stride == 2 else first, second, third, fourth), axis=1
        )


class PyramidPooling(nn.Module):
    """The simple pyramid pooling module: Peng et al. 2022, section 3.4.

    The map is averaged to 1, 2 and 4 bins a side; each result is convolved and enlarged again, and their sum is convolved.
    """

    BINS = (1, 2, 4)

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList([ConvUnit(in_channels, channels, 1) for _ in self.BINS])
        self.out = ConvUnit(channels, channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, channels, H, W)."""
        size = ops.shape(x_BCHW)[2:]
        parts = [
            ops.resize_bilinear(branch(average(x_BCHW, bins)), size)
            for bins, branch in zip(self.BINS, self.branches, strict=True)
        ]
        return self.out(parts[0] + parts[1] + parts[2])


class AttentionFusion(nn.Module):
    """The unified attention fusion module with spatial attention: Peng et al. 2022, section 3.3, equations 1 to 3."""

    def __init__(self, low_channels: int, high_channels: int, channels: int) -> None:
        super().__init__()
        self.low = ConvUnit(low_channels, high_channels)
        self.attention = nn.Sequential(ConvUnit(4, 2), ConvUnit(2, 1, active=False))
        self.out = ConvUnit(high_channels, channels)

    def forward(self, low_BCHW: Tensor, high_BCHW: Tensor) -> Tensor:
        """Fuse a map of the encoder, (B, low channels, H, W), with the smaller one of the decoder before."""
        low_BCHW = self.low(low_BCHW)
        high_BCHW = ops.resize_bilinear(high_BCHW, ops.shape(low_BCHW)[2:])
        summary = [part(x, axis=1, keepdims=True) for x in (high_BCHW, low_BCHW) for part in (ops.mean, ops.max)]
        share_B1HW = ops.sigmoid(self.attention(ops.concat(summary, axis=1)))
        return self.out(high_BCHW * share_B1HW + low_BCHW * (1 - share_B1HW))


def average(x_BCHW: Tensor, bins: int) -> Tensor:
    """Average a map to (B, C, G, G); bin i covers the lines from ``floor(i * H / G)`` to ``ceil((i + 1) * H / G)``."""
    down_GH, across_GW = (
        ops.asarray(_bins(size, bins), like=x_BCHW, dtype=ops.dtype(x_BCHW)) for size in _sides(x_BCHW)
    )
    return ops.matmul(ops.matmul(down_GH, x_BCHW), ops.permute_dims(across_GW, (1, 0)))


def _sides(x_BCHW: Tensor) -> Sequence[int]:
    return ops.shape(x_BCHW)[2:]


def _bins(size: int, bins: int) -> Array:
    """Return the matrix (bins, size) that averages lines."""
    matrix = np.zeros((bins, size))
    for number in range(bins):
        first, end = number * size // bins, -(-(number + 1) * size // bins)
        matrix[number, first:end] = 1 / (end - first)
    return matrix
