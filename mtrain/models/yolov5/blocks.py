"""The layers of YOLOv5. Import it only where a framework is bound.

Shape letters: B batch, C channels, H and W height and width of the feature map.
"""

from mtrain.core import nn, ops
from mtrain.core.interfaces import Tensor


class ConvNormAct(nn.Module):
    """A convolution without bias, BatchNorm and SiLU. The default padding keeps the size of the map at stride 1."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1, padding: int | None = None
    ) -> None:
        super().__init__()
        pad = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, pad, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.03, silu=True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, out, H / stride, W / stride)."""
        return self.bn(self.conv(x_BCHW))


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution with the same number of channels, plus the input if ``shortcut``."""

    def __init__(self, channels: int, *, shortcut: bool) -> None:
        super().__init__()
        self.cv1 = ConvNormAct(channels, channels)
        self.cv2 = ConvNormAct(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return a map of the same shape."""
        y_BCHW = self.cv2(self.cv1(x_BCHW))
        return x_BCHW + y_BCHW if self.shortcut else y_BCHW


class C3(nn.Module):
    """Cross-stage partial block with three convolutions (Wang et al. 2020, CSPNet, figure 2b, as YOLOv5 builds it)."""

    def __init__(self, in_channels: int, out_channels: int, repeats: int, *, shortcut: bool) -> None:
        super().__init__()
        hidden = out_channels // 2
        self.cv1 = ConvNormAct(in_channels, hidden)
        self.cv2 = ConvNormAct(in_channels, hidden)
        self.cv3 = ConvNormAct(2 * hidden, out_channels)
        self.m = nn.Sequential(*(Bottleneck(hidden, shortcut=shortcut) for _ in range(repeats)))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, out, H, W)."""
        return self.cv3(ops.concat((self.m(self.cv1(x_BCHW)), self.cv2(x_BCHW)), axis=1))


class SPPF(nn.Module):
    """Spatial pyramid pooling (He et al. 2014) by three successive 5x5 pools, which see 5, 9 and 13 pixels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        hidden = in_channels // 2
        self.cv1 = ConvNormAct(in_channels, hidden)
        self.cv2 = ConvNormAct(4 * hidden, out_channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, out, H, W)."""
        pyramid = [self.cv1(x_BCHW)]
        for _ in range(3):
            pyramid.append(ops.max_pool2d(pyramid[-1], 5, 1, 2))
        return self.cv2(ops.concat(pyramid, axis=1))


class Concat(nn.Module):
    """Joins feature maps of equal height and width along the channels."""

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Map several (B, Ci, H, W) to one (B, sum of Ci, H, W)."""
        return ops.concat(maps, axis=1)
