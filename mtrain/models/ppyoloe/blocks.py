"""The layers of PP-YOLOE. Import it only where a framework is bound. State names are the published ones.

Shape letters: B batch, C channels, H and W height and width of the feature map.
"""

from mtrain.core import nn, ops
from mtrain.core.interfaces import Tensor

_GATE_SLOPE = 0.1666667
"""Slope of the hard sigmoid with which the published weights were trained; not exactly 1 / 6."""


class ConvNorm(nn.Module):
    """Convolution without bias that keeps the size at stride 1, BatchNorm, SiLU unless ``act`` is False."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1, *, act: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=1e-5, momentum=0.1, unbiased_variance=False, silu=act)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, out, H / stride, W / stride)."""
        return self.bn(self.conv(x_BCHW))


class RepConv(nn.Module):
    """A 3x3 and a 1x1 convolution, each with its BatchNorm, added and followed by SiLU.

    Ding et al. 2021, RepVGG, without the identity branch. With ``deploy`` a single 3x3 convolution with bias replaces
    both; ``models.ppyoloe.model.fuse`` makes its weights. With ``weighed`` the second branch has a learned factor ``alpha``, as in
    the backbone of PP-YOLOE+.
    """

    def __init__(self, channels: int, *, deploy: bool, weighed: bool = False) -> None:
        super().__init__()
        self.deploy, self.weighed = deploy, weighed
        if deploy:
            self.conv = nn.Conv2d(channels, channels, 3, padding=1)
            return
        if weighed:
            self.alpha = nn.parameter((1,), fill=1.0)
        self.conv1 = ConvNorm(channels, channels, 3, act=False)
        self.conv2 = ConvNorm(channels, channels, 1, act=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return a map of the same shape."""
        if self.deploy:
            return ops.silu(self.conv(x_BCHW))
        # As published, the factor belongs to the 1x1 branch alone; ``fuse`` multiplies its kernel by it.
        point_BCHW = self.conv2(x_BCHW)
        return ops.silu(self.conv1(x_BCHW) + (self.alpha * point_BCHW if self.weighed else point_BCHW))


class RepBlock(nn.Module):
    """A 3x3 convolution, then ``RepConv``, plus the input if ``shortcut``."""

    def __init__(self, channels: int, *, shortcut: bool, deploy: bool, weighed: bool = False) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3)
        self.conv2 = RepConv(channels, deploy=deploy, weighed=weighed)
        self.shortcut = shortcut

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return a map of the same shape."""
        y_BCHW = self.conv2(self.conv1(x_BCHW))
        return x_BCHW + y_BCHW if self.shortcut else y_BCHW


class ChannelGate(nn.Module):
    """Effective squeeze-excitation: channels scaled by gates in 0..1 computed from their means (Lee and Park 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return a map of the same shape."""
        mean_BC11 = ops.mean(x_BCHW, axis=(2, 3), keepdims=True)
        return x_BCHW * ops.hardsigmoid(self.fc(mean_BC11), slope=_GATE_SLOPE)


class Pyramid(nn.Module):
    """Spatial pyramid pooling: the map and its maxima over 5, 9 and 13 pixels, joined by a 1x1 convolution.

    He et al. 2014. Three successive pools of 5 pixels see 5, 9 and 13 pixels, and cost less than one pool of each size.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = ConvNorm(4 * channels, channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return a map of the same shape."""
        maps = [x_BCHW]
        # Three successive pools of 5 pixels see 5, 9 and 13, and cost less than one pool of each size.
        for _ in range(3):
            maps.append(ops.max_pool2d(maps[-1], 5, 1, 2))
        return self.conv(ops.concat(maps, axis=1))


class Stage(nn.Module):
    """A stage of the backbone: a 3x3 convolution at stride 2, two paths of half the channels, and a gate.

    One of the two paths goes through the residual blocks.
    """

    def __init__(self, in_channels: int, out_channels: int, repeats: int, *, deploy: bool, weighed: bool) -> None:
        super().__init__()
        middle = (in_channels + out_channels) // 2
        half = middle // 2
        self.conv_down = ConvNorm(in_channels, middle, 3, 2)
        self.conv1 = ConvNorm(middle, half)
        self.conv2 = ConvNorm(middle, half)
        blocks = (RepBlock(half, shortcut=True, deploy=deploy, weighed=weighed) for _ in range(repeats))
        self.blocks = nn.Sequential(*blocks)
        self.attn = ChannelGate(2 * half)
        self.conv3 = ConvNorm(2 * half, out_channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, out, H / 2, W / 2)."""
        x_BCHW = self.conv_down(x_BCHW)
        paths = (self.conv1(x_BCHW), self.blocks(self.conv2(x_BCHW)))
        return self.conv3(self.attn(ops.concat(paths, axis=1)))


class Chain(nn.Module):
    """Blocks named ``0``, ``1``, ... in sequence; with ``pyramid``, a ``Pyramid`` ``spp`` follows the middle one."""

    def __init__(self, channels: int, repeats: int, *, pyramid: bool, deploy: bool, weighed: bool) -> None:
        super().__init__()
        self.order: list[str] = []
        for i in range(repeats):
            self._append(str(i), RepBlock(channels, shortcut=False, deploy=deploy, weighed=weighed))
            if pyramid and i == (repeats - 1) // 2:
                self._append("spp", Pyramid(channels))

    def _append(self, name: str, layer: nn.Module) -> None:
        # As attributes and not in a list, because published weights have these names.
        setattr(self, name, layer)
        self.order.append(name)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return a map of the same shape."""
        for name in self.order:
            x_BCHW = getattr(self, name)(x_BCHW)
        return x_BCHW


class NeckStage(nn.Module):
    """Two paths of half the channels, one with the blocks, joined by a 1x1 convolution (Wang et al. 2020, CSPNet)."""

    def __init__(
        self, in_channels: int, out_channels: int, repeats: int, *, pyramid: bool, deploy: bool, weighed: bool
    ) -> None:
        super().__init__()
        half = out_channels // 2
        self.conv1 = ConvNorm(in_channels, half)
        self.conv2 = ConvNorm(in_channels, half)
        self.convs = Chain(half, repeats, pyramid=pyramid, deploy=deploy, weighed=weighed)
        self.conv3 = ConvNorm(2 * half, out_channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, out, H, W)."""
        paths = (self.conv1(x_BCHW), self.convs(self.conv2(x_BCHW)))
        return self.conv3(ops.concat(paths, axis=1))


class HeadStem(nn.Module):
    """A 1x1 convolution of the map, whose channels are gated by their means first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)
        self.conv = ConvNorm(channels, channels)

    def forward(self, x_BCHW: Tensor, mean_BC11: Tensor) -> Tensor:
        """Shape kept; ``mean_BC11`` is the mean of ``x_BCHW`` over its pixels."""
        return self.conv(x_BCHW * ops.sigmoid(self.fc(mean_BC11)))
