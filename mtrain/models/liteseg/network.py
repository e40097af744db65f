"""The real-time network on the bound framework. Import it only where a framework is bound.

Architecture: Peng et al. 2022, PP-LiteSeg (arXiv 2204.02681), figure 2: an STDC encoder, pyramid pooling, and a decoder
whose channels become fewer as its maps become larger. Shape letters: B batch, S side of the input, C channels or classes, H
and W of a feature map.
"""

import itertools
from typing import Any

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Collective, Tensor
from mtrain.models.common.imitation import Imitator, Signals
from mtrain.models.common.pixel_losses import losses
from mtrain.models.common.pixels import normalise, predict_classes, wide
from mtrain.models.liteseg.blocks import STDC, AttentionFusion, ConvUnit, PyramidPooling
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
        x_B3SS = normalise(batch, mean=options.mean, std=options.std, dtype=ops.dtype(self.classifier.weight))
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

    def signals(self, batch: Batch) -> Signals:
        """Show the class logits of each pixel (B, C, S, S)."""
        options = self.options
        x_B3SS = normalise(batch, mean=options.mean, std=options.std, dtype=ops.dtype(self.classifier.weight))
        return Signals(logits=ops.resize_bilinear(wide(self.logits(x_B3SS)), ops.shape(x_B3SS)[2:]))

    def raw(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``logits`` (B, C, S, S) of the classes of each pixel."""
        options = self.options
        x_B3SS = normalise(batch, mean=options.mean, std=options.std, dtype=ops.dtype(self.classifier.weight))
        return {"logits": ops.resize_bilinear(wide(self.logits(x_B3SS)), ops.shape(x_B3SS)[2:])}

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
