"""The residual network on the bound framework. Import it only where a framework is bound.

Architecture: He et al. 2015 (arXiv 1512.03385), table 1, with projection shortcuts where the shape changes (option B).
In a bottleneck the 3x3 convolution has the stride, as in torchvision. Parameters have torchvision's names. Shape letters:
B batch, S side of the image in pixels, C channels or classes, H and W height and width of the feature map.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Tensor
from mtrain.models.common.imitation import Imitator, Signals
from mtrain.models.common.pixels import normalise, wide

STEM_WIDTH = 64
"""Channels of the first convolution and of the first stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a network, and the pixel statistics of its input."""

    blocks: tuple[int, int, int, int]
    """Number of blocks of each stage."""
    bottleneck: bool
    """Whether blocks have three convolutions (1x1, 3x3, 1x1), the last one four times as wide; else two (3x3)."""
    class_count: int
    mean: Sequence[float]
    """Of red, green and blue, in 0..1; subtracted from pixels."""
    std: Sequence[float]
    """Of red, green and blue, in 0..1; pixels are divided by it."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (figure 5, left)."""

    expansion = 1
    """Channels that it returns, as a multiple of ``width``."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.has_projection = stride != 1 or in_channels != width
        if self.has_projection:
            self.downsample = _projection(in_channels, width, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, width, H / stride, W / stride)."""
        y_BCHW = ops.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.bn2(self.conv2(y_BCHW))
        return ops.relu(y_BCHW + (self.downsample(x_BCHW) if self.has_projection else x_BCHW))


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut (figure 5, right)."""

    expansion = 4
    """Channels that it returns, as a multiple of ``width``."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, self.expansion * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(self.expansion * width)
        self.has_projection = stride != 1 or in_channels != self.expansion * width
        if self.has_projection:
            self.downsample = _projection(in_channels, self.expansion * width, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, 4 * width, H / stride, W / stride)."""
        y_BCHW = ops.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = ops.relu(self.bn2(self.conv2(y_BCHW)))
        y_BCHW = self.bn3(self.conv3(y_BCHW))
        return ops.relu(y_BCHW + (self.downsample(x_BCHW) if self.has_projection else x_BCHW))


class Network(Imitator):
    """The classifier with its loss. It returns losses in training, ``probabilities`` (B, C) in evaluation.

    Args:
        shape: Sizes of the network.
        label_smoothing: See ``ops.cross_entropy``.
    """

    conv1: Any
    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module
    layer4: nn.Module

    def __init__(self, shape: Shape, *, label_smoothing: float) -> None:
        super().__init__()
        self.mean, self.std, self.label_smoothing = tuple(shape.mean), tuple(shape.std), label_smoothing
        block = Bottleneck if shape.bottleneck else BasicBlock
        self.conv1 = nn.Conv2d(3, STEM_WIDTH, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH)
        channels = STEM_WIDTH
        for stage, count in enumerate(shape.blocks):
            width = STEM_WIDTH * 2**stage
            blocks = []
            for number in range(count):
                # The first block of each stage but the first halves the size.
                blocks.append(block(channels, width, 2 if stage and not number else 1))
                channels = block.expansion * width
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, shape.class_count)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``total``, the mean cross entropy of the micro batch, in training; ``probabilities`` in evaluation.

        Args:
            batch: ``images`` uint8 (B, S, S, 3) RGB; in training also ``labels`` int64 (B,).
        """
        signals = self.signals(batch)
        logits_BC = signals.logits
        if not self.training:
            return {"probabilities": ops.softmax(logits_BC, 1)}
        losses_B = ops.cross_entropy(logits_BC, batch["labels"], label_smoothing=self.label_smoothing)
        return self.taught({"total": ops.mean(losses_B)}, batch, lambda: signals)

    def signals(self, batch: Batch) -> Signals:
        """Show the class logits, and the feature maps of the last three stages: strides 8, 16, 32."""
        maps = self.features(self.pixels(batch["images"]))
        return Signals(logits=self.classify(maps[-1]), maps=maps)

    def raw(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``logits`` (B, C) of the classes."""
        return {"logits": self.logits(self.pixels(batch["images"]))}

    def pixels(self, images_BSS3: Tensor) -> Tensor:
        """Normalise images, uint8 (B, S, S, 3), to (B, 3, S, S) in the dtype of the weights."""
        return normalise(images_BSS3, mean=self.mean, std=self.std, dtype=ops.dtype(self.conv1.weight))

    def features(self, pixels_B3SS: Tensor) -> list[Tensor]:
        """Return the feature maps of the last three stages for normalised pixels."""
        x_BCHW = ops.relu(self.bn1(self.conv1(pixels_B3SS)))
        x_BCHW = ops.max_pool2d(x_BCHW, 3, 2, 1)
        maps = []
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x_BCHW = stage(x_BCHW)
            maps.append(x_BCHW)
        return maps[1:]

    def logits(self, pixels_B3SS: Tensor) -> Tensor:
        """Compute the class logits (B, C), in float32 or float64, from normalised pixels."""
        return self.classify(self.features(pixels_B3SS)[-1])

    def classify(self, x_BCHW: Tensor) -> Tensor:
        """Compute the class logits (B, C), in float32 or float64, from the last feature map."""
        return wide(self.fc(ops.mean(x_BCHW, axis=(2, 3))))


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    """Make the shortcut of a block that changes the shape: a 1x1 convolution and BatchNorm."""
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels))
