"""YOLOv5's network on the bound framework. Import it only where a framework is bound.

Architecture: CSP backbone (Wang et al. 2020), SPPF, path aggregation neck (Liu et al. 2018), three anchor-based heads
(Redmon and Farhadi 2018), in the arrangement of YOLOv5 6.0. State names are YOLOv5's: ``model.<layer>.<...>``.
Shape letters: B batch, L levels, A anchors of a level, N = A * cells of all levels, C = 5 + classes, H height, W width.
"""

import math
from collections.abc import Sequence

import numpy as np

from mtrain.core import nn, ops
from mtrain.core.interfaces import Array, Batch, Tensor
from mtrain.models.common.imitation import Detections, Imitator, Signals
from mtrain.models.common.pixels import as_floats
from mtrain.models.yolov5.loss import START_BALANCE, LossSettings, loss

STRIDES = (8, 16, 32)
_INPUTS = {12: 6, 16: 4, 19: 14, 22: 10}
"""Maps the number of a layer that joins two maps to the layer of its second input.

All others take the previous layer.
"""
_HEADS = (17, 20, 23)
"""Numbers of the layers whose outputs the heads read."""


class Detect(nn.Module):
    """The heads: a 1x1 convolution per level, and the anchors in grid units."""

    def __init__(self, channels: Sequence[int], anchors_px: Array, class_count: int) -> None:
        super().__init__()
        strides = np.asarray(STRIDES, np.float32)[:, None, None]
        nn.buffer(self, "anchors", np.asarray(anchors_px, np.float32) / strides)
        outputs = anchors_px.shape[1] * (5 + class_count)
        self.m = nn.ModuleList([nn.Conv2d(c, outputs, 1) for c in channels])

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Map the feature map of each level to raw predictions (B, A * C, H, W)."""
        return [conv(x_BCHW) for conv, x_BCHW in zip(self.m, maps, strict=True)]


class LevelBalance(nn.Module):
    """The weights of the levels' objectness losses; with ``adapt`` they move towards 1 / loss.

    The weight of stride 16 stays 1. Weights that adapt are a buffer, so that a resumed job continues with them; each
    rank follows its own micro batches.
    """

    moved_L: Tensor

    def __init__(self, *, adapt: bool) -> None:
        super().__init__()
        self.adapt = adapt
        if adapt:
            nn.buffer(self, "moved_L", np.asarray(START_BALANCE, np.float64))

    def weights_L(self, like: Tensor) -> Tensor:
        """Return a copy of the weights (L,) for this micro batch."""
        return ops.astype(self.moved_L, ops.dtype(like)) * 1 if self.adapt else ops.constant(START_BALANCE, like=like)

    def update(self, weights_L: Tensor, obj_L: Tensor) -> None:
        """Move the weights according to each level's mean objectness loss in this micro batch."""
        if self.adapt:
            moved_L = 0.9999 * weights_L + 0.0001 / obj_L
            self.moved_L[:] = moved_L / moved_L[1:2]


class Network(Imitator):
    """YOLOv5 with its loss. It returns losses in training, ``decoded`` (B, N, C) in evaluation.

    Args:
        depth: Factor for the number of bottlenecks.
        width: Factor for the number of channels.
        anchors_px: Anchors (L, A, 2) in pixels.
        settings: Settings of the loss.
    """

    def __init__(self, *, depth: float, width: float, anchors_px: Array, settings: LossSettings) -> None:
        super().__init__()
        self.settings = settings
        self.model = nn.ModuleList(_layers(depth, width, anchors_px, settings.class_count))
        self.balance = LevelBalance(adapt=settings.autobalance)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return losses in training (see ``loss``), ``decoded`` in evaluation (see ``decode``).

        Args:
            batch: ``images`` uint8 (B, H, W, 3) RGB, sides multiples of 32; in training also ``targets`` float32 (T, 6)
                ``[image, class, xc, yc, w, h]``, boxes as shares of the image.
        """
        maps = self.maps(batch)
        heads = list(self.model[-1](maps))
        if not self.training:
            return {"decoded": self.decode(heads)}
        losses = self.loss(heads, batch["targets"])
        return self.taught(losses, batch, lambda: self._signals(maps, heads), scale=self.settings.gain)

    def signals(self, batch: Batch) -> Signals:
        """Show the decoded predictions, one for each anchor of a cell, and the maps that the heads read."""
        maps = self.maps(batch)
        return self._signals(maps, list(self.model[-1](maps)))

    def _signals(self, maps: Sequence[Tensor], heads: Sequence[Tensor]) -> Signals:
        levels = []
        for level, head_BCHW in enumerate(heads):
            decoded_BNC = self._decode_level(_at_least_float32(head_BCHW), level)
            batch, rows, columns = ops.shape(decoded_BNC)
            anchors = ops.shape(self.model[-1].anchors)[1]
            levels.append(ops.reshape(decoded_BNC, (batch, anchors, rows // anchors, columns)))
        all_BAMC = ops.concat(levels, axis=2)
        centre, half = all_BAMC[..., :2], all_BAMC[..., 2:4] / 2
        boxes_BAM4 = ops.concat((centre - half, centre + half), axis=3)
        return Signals(
            detections=Detections(scores_BAMC=all_BAMC[..., 4:5] * all_BAMC[..., 5:], boxes_BAM4=boxes_BAM4), maps=maps
        )

    def maps(self, batch: Batch) -> list[Tensor]:
        """Return the feature maps that the heads read for a batch's images: strides 8, 16, 32."""
        outputs = self.features(self.as_input(batch["images"]))
        return [outputs[i] for i in _HEADS]

    def as_input(self, images_BHW3: Tensor) -> Tensor:
        """Convert images, uint8 (B, H, W, 3), to (B, 3, H, W) in 0..1 in the dtype of the weights."""
        dtype = ops.dtype(self.model[0].conv.weight)
        x_BHW3 = ops.astype(as_floats(images_BHW3, dtype=dtype) / 255, dtype)
        return ops.permute_dims(x_BHW3, (0, 3, 1, 2))

    def raw(self, batch: Batch) -> dict[str, Tensor]:
        """Return the raw predictions of each level, ``stride_8`` and so on, (B, A * C, H / stride, W / stride)."""
        heads = self.model[-1](self.maps(batch))
        return {f"stride_{stride}": head_BCHW for stride, head_BCHW in zip(STRIDES, heads, strict=True)}

    def features(self, images_B3HW: Tensor) -> list[Tensor]:
        """Return the output of each of the 24 layers before the heads."""
        outputs: list[Tensor] = []
        x_BCHW = images_B3HW
        for i in range(len(self.model) - 1):
            second = _INPUTS.get(i)
            x_BCHW = self.model[i](x_BCHW if second is None else [x_BCHW, outputs[second]])
            outputs.append(x_BCHW)
        return outputs

    def heads(self, images_B3HW: Tensor) -> list[Tensor]:
        """Return the raw predictions of each level, (B, A * C, H / stride, W / stride)."""
        outputs = self.features(images_B3HW)
        return list(self.model[-1]([outputs[i] for i in _HEADS]))

    def loss(self, heads: Sequence[Tensor], targets_T6: Tensor) -> dict[str, Tensor]:
        """Compute the losses: ``total`` carries the gradient; ``box``, ``obj``, ``cls`` (after gains) are detached."""
        heads = [_at_least_float32(head) for head in heads]
        anchors_LA2 = ops.astype(self.model[-1].anchors, ops.dtype(heads[0]))
        balance_L = self.balance.weights_L(like=heads[0])
        losses, obj_L = loss(heads, targets_T6, anchors_LA2, balance_L, self.settings)
        self.balance.update(balance_L, obj_L)
        return losses

    def decode(self, heads: Sequence[Tensor]) -> Tensor:
        """Decode raw predictions to (B, N, C): xc, yc, w, h in pixels of the network's input, then scores in 0..1.

        Rows are ordered by (level, anchor, y, x).
        """
        return ops.concat([self._decode_level(_at_least_float32(head), i) for i, head in enumerate(heads)], axis=1)

    def _decode_level(self, head_BCHW: Tensor, level: int) -> Tensor:
        anchors_A2 = ops.astype(self.model[-1].anchors[level], ops.dtype(head_BCHW))
        batch, channels, height, width = ops.shape(head_BCHW)
        per_level = ops.shape(anchors_A2)[0]
        columns = channels // per_level
        x_BACHW = ops.reshape(head_BCHW, (batch, per_level, columns, height, width))
        s_BAHWC = ops.sigmoid(ops.permute_dims(x_BACHW, (0, 1, 3, 4, 2)))
        x_W, y_H = ops.arange(0, width, like=head_BCHW), ops.arange(0, height, like=head_BCHW)
        grid_HW2 = ops.stack(ops.meshgrid(x_W, y_H, indexing="xy"), axis=2)
        xy = (s_BAHWC[..., :2] * 2 - 0.5 + grid_HW2) * STRIDES[level]
        wh = ops.square(s_BAHWC[..., 2:4] * 2) * (anchors_A2 * STRIDES[level])[:, None, None]
        decoded = ops.concat((xy, wh, s_BAHWC[..., 4:]), axis=4)
        return ops.reshape(decoded, (batch, per_level * height * width, columns))


def _at_least_float32(x: Tensor) -> Tensor:
    return x if ops.dtype(x) in ("float32", "float64") else ops.astype(x, "float32")


def _layers(depth: float, width: float, anchors_px: Array, class_count: int) -> list[nn.Module]:
    """Make the 25 layers in the order of their state names."""

    def c(channels: int) -> int:
        return math.ceil(channels * width / 8) * 8

    def n(repeats: int) -> int:
        return max(round(repeats * depth), 1)

    return [
        ConvNormAct(3, c(64), 6, 2, padding=2),  # 0
        ConvNormAct(c(64), c(128), 3, 2),
        C3(c(128), c(128), n(3), shortcut=True),
        ConvNormAct(c(128), c(256), 3, 2),
        C3(c(256), c(256), n(6), shortcut=True),  # 4, stride 8
        ConvNormAct(c(256), c(512), 3, 2),
        C3(c(512), c(512), n(9), shortcut=True),  # 6, stride 16
        ConvNormAct(c(512), c(1024), 3, 2),
        C3(c(1024), c(1024), n(3), shortcut=True),
        SPPF(c(1024), c(1024)),
        ConvNormAct(c(1024), c(512)),  # 10, stride 32
        nn.Upsample(scale_factor=2),
        Concat(),
        C3(2 * c(512), c(512), n(3), shortcut=False),
        ConvNormAct(c(512), c(256)),  # 14
        nn.Upsample(scale_factor=2),
        Concat(),
        C3(2 * c(256), c(256), n(3), shortcut=False),  # 17, to the head of stride 8
        ConvNormAct(c(256), c(256), 3, 2),
        Concat(),
        C3(2 * c(256), c(512), n(3), shortcut=False),  # 20, stride 16
        ConvNormAct(c(512), c(512), 3, 2),
        Concat(),
        C3(2 * c(512), c(1024), n(3), shortcut=False),  # 23, stride 32
        Detect((c(256), c(512), c(1024)), anchors_px, class_count),
    ]


# Shape letters: B batch, C channels, H and W height and width of the feature map.
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
