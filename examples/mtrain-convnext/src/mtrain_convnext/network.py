"""The network on mtrain's neutral layers: the same code for torch and Paddle. `ConvNeXt.build` imports it.

Shape letters: B batch, S side of the image in pixels, C channels or classes, H and W height and width of a map.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a network."""

    depths: Sequence[int]
    """Number of blocks of each stage."""
    widths: Sequence[int]
    """Channels of each stage."""
    class_count: int


class Settings(Protocol):
    """The options of the plugin that the network uses."""

    drop_path: float
    layer_scale: float
    label_smoothing: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of each pixel, (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Assigned one by one, so that the names are `weight` and `bias` and not those of a layer inside.
        self.weight = nn.parameter((channels,), fill=1.0)
        self.bias = nn.parameter((channels,))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalise each pixel; in half precision the statistics are float32."""
        x = x_BCHW if ops.dtype(x_BCHW) == "float64" else ops.astype(x_BCHW, "float32")
        centred = x - ops.mean(x, axis=1, keepdims=True)
        variance = ops.mean(ops.square(centred), axis=1, keepdims=True)
        y = ops.astype(centred / ops.sqrt(variance + 1e-6), ops.dtype(x_BCHW))
        return y * ops.reshape(self.weight, (1, -1, 1, 1)) + ops.reshape(self.bias, (1, -1, 1, 1))


class Block(nn.Module):
    """A 7x7 depthwise convolution and two linear layers on each pixel, beside a shortcut (figure 4)."""

    def __init__(self, channels: int, *, drop_path: float, name: str) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, 1, 3, groups=channels)
        self.norm = nn.LayerNorm(channels, 1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.parameter((channels,))
        self.drop_path = drop_path
        self.drop = nn.Dropout(drop_path, name=name)

    def forward(self, x_BCHW: Tensor, random_key: Tensor | None) -> Tensor:
        """Return the shape of the input. `random_key`: see `nn.Dropout`; None in evaluation."""
        y_BHWC = ops.permute_dims(self.dwconv(x_BCHW), (0, 2, 3, 1))
        y_BHWC = self.pwconv2(ops.gelu(self.pwconv1(self.norm(y_BHWC)))) * self.gamma
        if self.training and self.drop_path:
            # One element per sample is dropped or kept, and with it the whole branch: stochastic depth.
            kept_B1 = self.drop(ops.full((ops.shape(x_BCHW)[0], 1), 1.0, like=y_BHWC), random_key)
            y_BHWC = y_BHWC * ops.reshape(kept_B1, (-1, 1, 1, 1))
        return x_BCHW + ops.permute_dims(y_BHWC, (0, 3, 1, 2))


class Network(nn.Module):
    """The classifier with its loss. It returns losses in training, `probabilities` (B, C) in evaluation."""

    def __init__(self, shape: Shape, settings: Settings) -> None:
        super().__init__()
        self.mean, self.std, self.label_smoothing = settings.mean, settings.std, settings.label_smoothing
        widths, count = tuple(shape.widths), sum(shape.depths)
        stem = nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0]))
        halvings = [
            nn.Sequential(ChannelNorm(fine), nn.Conv2d(fine, coarse, 2, 2)) for fine, coarse in pairwise(widths)
        ]
        self.downsample_layers = nn.ModuleList([stem, *halvings])
        stages, number = [], 0
        for width, depth in zip(widths, shape.depths, strict=True):
            blocks = []
            for _ in range(depth):
                rate = settings.drop_path * number / max(count - 1, 1)
                blocks.append(Block(width, drop_path=rate, name=f"block{number}"))
                number += 1
            stages.append(nn.ModuleList(blocks))
        self.stages = nn.ModuleList(stages)
        self.norm = nn.LayerNorm(widths[-1], 1e-6)
        self.head = nn.Linear(widths[-1], shape.class_count)

    def forward(self, batch: Batch) -> dict[str, Any]:
        """Return `total`, the mean cross entropy of the micro batch, in training; `probabilities` in evaluation."""
        logits_BC = self.logits(self.pixels(batch["images"]), batch.get("random_key"))
        if not self.training:
            return {"probabilities": ops.softmax(logits_BC, 1)}
        losses_B = ops.cross_entropy(logits_BC, batch["labels"], label_smoothing=self.label_smoothing)
        return {"total": ops.mean(losses_B)}

    def pixels(self, images_BSS3: Tensor) -> Tensor:
        """Normalise images, uint8 (B, S, S, 3), to (B, 3, S, S) in the number type of the weights."""
        dtype = ops.dtype(self.head.weight)
        x_BSS3 = ops.astype(images_BSS3, "float64" if dtype == "float64" else "float32") / 255
        mean_3, std_3 = (ops.asarray(each, like=x_BSS3, dtype=ops.dtype(x_BSS3)) for each in (self.mean, self.std))
        return ops.permute_dims(ops.astype((x_BSS3 - mean_3) / std_3, dtype), (0, 3, 1, 2))

    def logits(self, x_BCHW: Tensor, random_key: Tensor | None) -> Tensor:
        """Compute the class logits (B, C), in float32 or float64, from normalised pixels."""
        for halve, blocks in zip(self.downsample_layers, self.stages, strict=True):
            x_BCHW = halve(x_BCHW)
            for block in blocks:
                x_BCHW = block(x_BCHW, random_key)
        logits_BC = self.head(self.norm(ops.mean(x_BCHW, axis=(2, 3))))
        return logits_BC if ops.dtype(logits_BC) == "float64" else ops.astype(logits_BC, "float32")
