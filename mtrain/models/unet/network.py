"""The U-Net on the bound framework. Import it only where a framework is bound.

Architecture: Ronneberger et al. 2015 (arXiv 1505.04597), figure 1; convolutions are padded, so that the output has the
size of the input, and followed by BatchNorm. Shape letters: B batch, S side of the input, C channels or classes, H and W of
a feature map.
"""

from typing import Any

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Collective, Tensor
from mtrain.models.common.imitation import Imitator, Signals
from mtrain.models.common.pixel_losses import losses
from mtrain.models.common.pixels import normalise, predict_classes, wide
from mtrain.models.unet.options import UNetOptions


class Double(nn.Module):
    """Two 3x3 convolutions, each with BatchNorm and ReLU."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, channels, H, W)."""
        x_BCHW = ops.relu(self.bn1(self.conv1(x_BCHW)))
        return ops.relu(self.bn2(self.conv2(x_BCHW)))


class Up(nn.Module):
    """Doubles the size, joins the feature map of the way down that has it, and convolves twice."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.rise = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.pair = Double(2 * channels, channels)

    def forward(self, x_BCHW: Tensor, beside_BCHW: Tensor) -> Tensor:
        """Map (B, 2 * channels, H, W) and (B, channels, 2 * H, 2 * W) to (B, channels, 2 * H, 2 * W)."""
        return self.pair(ops.concat((beside_BCHW, self.rise(x_BCHW)), axis=1))


class Network(Imitator):
    """The U-Net with its loss. It returns losses in training, ``classes`` and ``certainty`` (B, S, S) in evaluation."""

    classifier: Any

    def __init__(self, options: UNetOptions, *, class_count: int, collective: Collective) -> None:
        super().__init__()
        self.options, self.collective = options, collective
        widths = [options.width * 2**level for level in range(options.depth + 1)]
        self.down = nn.ModuleList([Double(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True)])
        self.up = nn.ModuleList([Up(channels) for channels in reversed(widths[:-1])])
        self.drop = nn.Dropout(options.dropout, name="bottom")
        self.classifier = nn.Conv2d(options.width, class_count, 1)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the losses in training, see ``pixel_losses.losses``; predictions in evaluation.

        Args:
            batch: ``pixels`` uint8 (B, S, S, 4), RGB and class; in training for dropout also ``random_key`` int32 (B,).
        """
        signals = self.signals(batch)
        if not self.training:
            return predict_classes(signals.logits)
        found = losses(signals.logits, batch, options=self.options, collective=self.collective)
        return self.taught(found, batch, lambda: signals)

    def signals(self, batch: Batch) -> Signals:
        """Show the class logits of each pixel (B, C, S, S)."""
        options, dtype = self.options, ops.dtype(self.classifier.weight)
        x_B3SS = normalise(batch["pixels"][:, :, :, :3], mean=options.mean, std=options.std, dtype=dtype)
        return Signals(logits=wide(self.logits(x_B3SS, batch.get("random_key"))))

    def raw(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``logits`` (B, C, S, S) of the classes of each pixel."""
        return {"logits": self.signals(batch).logits}

    def logits(self, x_BCHW: Tensor, random_key: Tensor | None) -> Tensor:
        """Compute the class logits (B, C, S, S) from normalised pixels (B, 3, S, S)."""
        levels = []
        for number, double in enumerate(self.down):
            x_BCHW = double(x_BCHW if number == 0 else ops.max_pool2d(x_BCHW, 2))
            levels.append(x_BCHW)
        x_BCHW = self.drop(x_BCHW, random_key)
        # The smallest map is the one that rises; the others join it on the way up.
        for up, beside_BCHW in zip(self.up, levels[-2::-1], strict=True):
            x_BCHW = up(x_BCHW, beside_BCHW)
        return self.classifier(x_BCHW)
