"""PP-YOLOE's network on the bound framework. Import it only where a framework is bound.

Architecture: Xu et al. 2022, PP-YOLOE (arXiv 2203.16250): CSPRepResNet backbone, path aggregation neck, one anchor-free
head a level that predicts classes and, for each side of a box, a distribution over distances. Levels go from coarse to
fine: strides 32, 16, 8. State names are the published ones. Shape letters: B batch, L points of all levels, C classes,
S sides of a box (left, top, right, bottom), K bins of a distance, H height, W width.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mtrain.core import nn, ops
from mtrain.core.interfaces import Batch, Collective, Tensor
from mtrain.models.common.imitation import Detections, Imitator, Signals
from mtrain.models.common.pixels import as_floats
from mtrain.models.ppyoloe.assign import Points, Truth, points_of, truth_of
from mtrain.models.ppyoloe.blocks import ConvNorm, HeadStem, NeckStage, Stage
from mtrain.models.ppyoloe.loss import LossSettings, Outputs, assign, decode, loss
from mtrain.models.ppyoloe.truth import STATIC, Factors

STRIDES = (32, 16, 8)
BINS = 17
"""Number of bins of a distance: 0 to 16 strides."""
_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's images, RGB in 0..1."""


class Stem(nn.Module):
    """The first layers of the backbone: three 3x3 convolutions, the first at stride 2."""

    def __init__(self, out_channels: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(3, out_channels // 2, 3, 2)
        self.conv2 = ConvNorm(out_channels // 2, out_channels // 2, 3)
        self.conv3 = ConvNorm(out_channels // 2, out_channels, 3)

    def forward(self, x_B3HW: Tensor) -> Tensor:
        """Map (B, 3, H, W) to (B, out, H / 2, W / 2)."""
        return self.conv3(self.conv2(self.conv1(x_B3HW)))


class Backbone(nn.Module):
    """The backbone: a stem with ``channels[0]`` outputs, and a stage for each further entry."""

    def __init__(self, channels: Sequence[int], repeats: Sequence[int], *, deploy: bool, weighed: bool) -> None:
        super().__init__()
        self.stem = Stem(channels[0])
        pairs = zip(channels, channels[1:], repeats, strict=False)
        stages = [Stage(c_in, c_out, n, deploy=deploy, weighed=weighed) for c_in, c_out, n in pairs]
        self.stages = nn.ModuleList(stages)

    def forward(self, x_B3HW: Tensor) -> list[Tensor]:
        """Return the maps of the last three stages, fine to coarse: strides 8, 16, 32."""
        maps = [self.stem(x_B3HW)]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        # The finer maps serve no head.
        return maps[-3:]


class Neck(nn.Module):
    """The neck: path aggregation from coarse to fine, then from fine to coarse (Liu et al. 2018)."""

    def __init__(
        self, inputs: Sequence[int], outputs: Sequence[int], repeats: int, *, deploy: bool, weighed: bool
    ) -> None:
        """Make the neck for levels with ``inputs`` channels, which get ``outputs`` channels; both coarse to fine."""
        super().__init__()
        routes = [channels // 2 for channels in outputs[:-1]]

        def stage(c_in: int, c_out: int, *, pyramid: bool = False) -> nn.Module:
            return nn.Sequential(NeckStage(c_in, c_out, repeats, pyramid=pyramid, deploy=deploy, weighed=weighed))

        joined = [c_in + route for c_in, route in zip(inputs, [0, *routes], strict=True)]
        fpn = [stage(c_in, c_out, pyramid=i == 0) for i, (c_in, c_out) in enumerate(zip(joined, outputs, strict=True))]
        self.fpn_stages = nn.ModuleList(fpn)
        self.fpn_routes = nn.ModuleList([ConvNorm(2 * route, route) for route in routes])
        pairs = list(pairwise(outputs))
        self.pan_stages = nn.ModuleList([stage(coarse + fine, coarse) for coarse, fine in pairs])
        self.pan_routes = nn.ModuleList([ConvNorm(fine, fine, 3, 2) for _, fine in pairs])

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Map the backbone's maps, fine to coarse, to as many maps, coarse to fine."""
        downward: list[Tensor] = []
        for i, x_BCHW in enumerate(reversed(maps)):
            if i > 0:
                route_BCHW = ops.upsample_nearest(self.fpn_routes[i - 1](downward[-1]), 2)
                x_BCHW = ops.concat((route_BCHW, x_BCHW), axis=1)
            downward.append(self.fpn_stages[i](x_BCHW))
        upward = [downward[-1]]
        for i in reversed(range(len(downward) - 1)):
            joined_BCHW = ops.concat((self.pan_routes[i](upward[0]), downward[i]), axis=1)
            # Built from fine to coarse, handed on from coarse to fine, as heads and published names count levels.
            upward.insert(0, self.pan_stages[i](joined_BCHW))
        return upward


class Projection(nn.Module):
    """The distance of each bin in strides: an integer buffer ``weight`` (1, K, 1, 1), neither trained nor averaged."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        nn.buffer(self, "weight", np.arange(BINS, dtype=np.int64).reshape(1, BINS, 1, 1))

    def bins_K(self, like: Tensor) -> Tensor:
        """Return the distances (K) in the dtype of ``like``."""
        return ops.astype(ops.reshape(self.weight, (BINS,)), ops.dtype(like))


class Head(nn.Module):
    """The head: two branches per level, for class logits and distance logits (Feng et al. 2021, TOOD, simplified)."""

    def __init__(self, channels: Sequence[int], class_count: int) -> None:
        super().__init__()
        self.stem_cls = nn.ModuleList([HeadStem(c) for c in channels])
        self.stem_reg = nn.ModuleList([HeadStem(c) for c in channels])
        self.pred_cls = nn.ModuleList([nn.Conv2d(c, class_count, 3, padding=1) for c in channels])
        self.pred_reg = nn.ModuleList([nn.Conv2d(c, 4 * BINS, 3, padding=1) for c in channels])
        self.proj_conv = Projection()

    def forward(self, maps: Sequence[Tensor]) -> Outputs:
        """Map the neck's maps, coarse to fine, to logits in float32 or float64; points are ordered by (level, y, x)."""
        logits, distances = [], []
        for i, x_BCHW in enumerate(maps):
            mean_BC11 = ops.mean(x_BCHW, axis=(2, 3), keepdims=True)
            # The classes alone have a shortcut around the stem, as published.
            logits.append(_rows(self.pred_cls[i](self.stem_cls[i](x_BCHW, mean_BC11) + x_BCHW)))
            distances.append(_rows(self.pred_reg[i](self.stem_reg[i](x_BCHW, mean_BC11))))
        logits_BLC = _at_least_float32(ops.concat(logits, axis=1))
        distances_BLM = _at_least_float32(ops.concat(distances, axis=1))
        batch, points, _ = ops.shape(distances_BLM)
        return Outputs(
            logits_BLC=logits_BLC,
            distances_BLSK=ops.reshape(distances_BLM, (batch, points, 4, BINS)),
            bins_K=self.proj_conv.bins_K(like=distances_BLM),
        )


class Network(Imitator):
    """PP-YOLOE with its loss. It returns losses in training, and boxes with scores in evaluation, see ``forward``.

    Args:
        scale: Factors for the number of blocks and for the number of channels.
        settings: Settings of the loss.
        collective: Averages the normaliser of the loss over ranks.
        deploy: Build the network for inference, see ``models.ppyoloe.model.fuse``.
        plus: PP-YOLOE+: images in 0..1 that are not normalised further.
        factors: Where blocks have learned factors.
    """

    def __init__(
        self,
        *,
        scale: tuple[float, float],
        settings: LossSettings,
        collective: Collective,
        deploy: bool = False,
        plus: bool = False,
        factors: Factors = "none",
    ) -> None:
        super().__init__()
        self._normalised, (depth, width) = not plus, scale
        self.settings, self.collective = settings, collective
        channels = [round(c * width) for c in (64, 128, 256, 512, 1024)]
        outputs = [round(c * width) for c in (768, 384, 192)]
        repeats = [max(round(n * depth), 1) for n in (3, 6, 6, 3)]
        self.backbone = Backbone(channels, repeats, deploy=deploy, weighed=factors != "none")
        self.neck = Neck(
            channels[:-4:-1], outputs, max(round(3 * depth), 1), deploy=deploy, weighed=factors == "everywhere"
        )
        self.yolo_head = Head(outputs, settings.class_count)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return losses in training, predictions in evaluation.

        Args:
            batch: ``images`` uint8 (B, H, W, 3) RGB, sides multiples of 32; in training also ``targets`` float32 (T, 6)
                ``[image, class, xc, yc, w, h]``, boxes as shares of the image, and ``epoch`` int64 (1,); or what
                ``PPYOLOE.arranged`` makes of these.

        Returns: In training see ``loss``. In evaluation ``boxes`` ``[x1, y1, x2, y2]`` in pixels of the input, and
            ``scores`` in 0..1.
        """
        images_BHW3 = batch["images"]
        if not self.training:
            outputs, points = self.outputs(self.as_input(images_BHW3))
            boxes_BL4, _ = decode(outputs, points)
            return {"boxes": boxes_BL4 * points.stride_L1, "scores": ops.sigmoid(outputs.logits_BLC)}
        static, truth = self._truth(batch)
        maps = self.maps(self.as_input(images_BHW3))
        outputs, points = self.read(maps)
        losses = self.loss(outputs, points, truth, static=static)
        return self.taught(losses, batch, lambda: _signals(maps, outputs, points))

    def _truth(self, batch: Batch) -> tuple[bool, Truth]:
        """Return whether objects are assigned statically, and the objects."""
        if "labels" in batch:  # arranged by the model's plugin: nothing is read from the device
            return STATIC in batch, Truth(labels_BN=batch["labels"], boxes_BN4=batch["boxes"])
        static = int(ops.to_numpy(batch["epoch"])[0]) < self.settings.static_assigner_epoch
        shape = ops.shape(batch["images"])[:3]
        return static, truth_of(ops.to_numpy(batch["targets"]), shape=shape, like=batch["targets"])

    def signals(self, batch: Batch) -> Signals:
        """Show the predictions, one a cell, and the neck's maps."""
        maps = self.maps(self.as_input(batch["images"]))
        return _signals(maps, *self.read(maps))

    def raw(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``logits`` (B, L, C) of the classes and ``distances`` (B, L, S, K), logits of the bins."""
        outputs, _ = self.outputs(self.as_input(batch["images"]))
        return {"logits": outputs.logits_BLC, "distances": outputs.distances_BLSK}

    def as_input(self, images_BHW3: Tensor) -> Tensor:
        """Convert images, uint8 (B, H, W, 3), to normalised (B, 3, H, W) in the dtype of the weights."""
        dtype = ops.dtype(self.yolo_head.pred_cls[0].weight)
        x_BHW3 = as_floats(images_BHW3, dtype=dtype)
        if self._normalised:
            # One product and one sum in the place of two divisions and a difference.
            scale_3 = ops.constant(tuple(1 / (255 * d) for d in _DEVIATION), like=x_BHW3)
            shift_3 = ops.constant(tuple(-m / d for m, d in zip(_MEAN, _DEVIATION, strict=True)), like=x_BHW3)
            x_BHW3 = x_BHW3 * scale_3 + shift_3
        else:
            x_BHW3 = x_BHW3 * (1 / 255)
        return ops.permute_dims(ops.astype(x_BHW3, dtype), (0, 3, 1, 2))

    def outputs(self, images_B3HW: Tensor) -> tuple[Outputs, Points]:
        """Return the head's outputs for normalised images, and the points to which they belong."""
        return self.read(self.maps(images_B3HW))

    def maps(self, images_B3HW: Tensor) -> list[Tensor]:
        """Return the neck's maps for normalised images, coarse to fine."""
        maps: list[Tensor] = self.neck(self.backbone(images_B3HW))
        return maps

    def read(self, maps: Sequence[Tensor]) -> tuple[Outputs, Points]:
        """Return the head's outputs for the neck's maps, and the points to which they belong."""
        outputs = self.yolo_head(maps)
        sizes = [ops.shape(x_BCHW)[2:] for x_BCHW in maps]
        return outputs, points_of(sizes, STRIDES, like=outputs.logits_BLC)

    def loss(self, outputs: Outputs, points: Points, truth: Truth, *, static: bool) -> dict[str, Tensor]:
        """Compute the losses, see ``models.ppyoloe.loss.loss``; only ``total`` carries a gradient."""
        # Recorded for traces: a static choice follows from the boxes alone and is the same everywhere.
        if self.decided is not None and not static:
            boxes_BL4, _ = decode(outputs, points)
            found = assign(boxes_BL4, outputs.logits_BLC, points, truth, static=False)
            compared_BL4 = ops.where(found.positive_BL[:, :, None], found.boxes_BL4, 0.0)
            self.decided.append(ops.astype(compared_BL4, "float32"))
        return loss(outputs, points, truth, static=static, settings=self.settings, collective=self.collective)


def _signals(maps: Sequence[Tensor], outputs: Outputs, points: Points) -> Signals:
    """Turn the order of the levels round: signals go from fine to coarse."""
    boxes_BL4, _ = decode(outputs, points)
    predicted_BLC = ops.concat((boxes_BL4 * points.stride_L1, ops.sigmoid(outputs.logits_BLC)), axis=2)
    sizes = [math.prod(ops.shape(x_BCHW)[2:]) for x_BCHW in maps]
    levels = ops.split(predicted_BLC, sizes, axis=1)
    all_B1MC = ops.expand_dims(ops.concat(list(reversed(levels)), axis=1), 1)
    detections = Detections(scores_BAMC=all_B1MC[..., 4:], boxes_BAM4=all_B1MC[..., :4])
    return Signals(detections=detections, maps=list(reversed(maps)))


def _rows(x_BCHW: Tensor) -> Tensor:
    """Reshape (B, C, H, W) to (B, H * W, C), which is a view of channels-last memory."""
    batch, channels, height, width = ops.shape(x_BCHW)
    return ops.reshape(ops.permute_dims(x_BCHW, (0, 2, 3, 1)), (batch, height * width, channels))


def _at_least_float32(x: Tensor) -> Tensor:
    return x if ops.dtype(x) in ("float32", "float64") else ops.astype(x, "float32")
