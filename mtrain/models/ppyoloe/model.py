"""PP-YOLOE and PP-YOLOE+ s, m, l and x as model plugins: options, start values, reading of predictions, fusing for inference.

Only ``build`` needs a framework.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BaseModel, Field

from mtrain.core.interfaces import (
    Array,
    Collective,
    HostBatch,
    Module,
    PluginOptions,
    Published,
    Task,
    Tensor,
    Variation,
)
from mtrain.models.common.detector import Detector
from mtrain.models.common.nms import detections_by_class
from mtrain.models.common.start_values import generator_of
from mtrain.models.ppyoloe.truth import STATIC, Factors, group_rows

_SCALES = {"s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}
"""(depth, width) of each variant."""
_PRIOR = 0.01
"""Score of every class at every point before training: Lin et al. 2017, Focal Loss, section 4.1."""
_GATE_DEVIATION = 0.001
"""Standard deviation of the start weights of the head's gates; being so small, all gates start half open."""
_SELECTION = ("confidence", "iou_threshold", "max_candidates", "max_detections")


class PPYOLOEOptions(PluginOptions):
    """Options of the PP-YOLOE models, given in the spec as ``model.options``."""

    static_assigner_epoch: Annotated[int, Field(ge=0)] = 100
    """Epochs before this one assign objects by position and shape (ATSS), later ones by predictions (TOOD)."""
    cls: Annotated[float, Field(ge=0)] = 1.0
    iou: Annotated[float, Field(ge=0)] = 2.5
    dfl: Annotated[float, Field(ge=0)] = 0.5
    """``cls``, ``iou`` and ``dfl`` are the gains of the three losses."""
    confidence: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Predictions with this score or a lower one are dropped."""
    iou_threshold: Annotated[float, Field(gt=0, le=1)] = 0.7
    """A prediction that overlaps a better one of its class by more than this is dropped."""
    max_candidates: Annotated[int, Field(ge=1)] = 1000
    """Largest number of predictions per image and class that enter suppression."""
    max_detections: Annotated[int, Field(ge=1)] = 300
    """Largest number of detections per image."""
    factors: Factors | None = None
    """Where the second branch of a block has a learned factor: none, backbone or everywhere (the neck too); None: as published,
    in the backbone of PP-YOLOE+."""
    deploy: bool = False
    """Build the network for inference, where each pair of parallel convolutions is fused into one.

    It fits weights made by ``mtrain weights export --deploy``.
    """


class PPYOLOE(Detector):
    """PP-YOLOE as a ``Model`` of ``core.interfaces``. Subclasses name the variant."""

    Options: ClassVar[type[BaseModel]] = PPYOLOEOptions
    design: ClassVar[str] = "PP-YOLOE"
    recomputable: ClassVar[Sequence[str]] = (
        r"^backbone\.stem\.conv\d$",
        r"^backbone\.stages\.\d+\.(conv_down|conv\d|attn|blocks\.\d+)$",
        r"^neck\.(fpn|pan)_routes\.\d+$",
        r"^neck\.(fpn|pan)_stages\.\d+\.\d+\.(conv\d|convs\.\w+)$",
        r"^yolo_head\.stem_\w+\.\d+$",
    )
    spans_ranks: ClassVar[bool] = True
    published: ClassVar[Published] = Published(
        float32=("yolo_head.proj_conv.weight",),
        per_class=(r"^yolo_head\.pred_cls\.\d\.(weight|bias)$",),
    )
    variant: ClassVar[str]
    plus: ClassVar[bool] = False
    """Whether it is PP-YOLOE+, see ``network.Network``."""

    options: PPYOLOEOptions

    def build(self, task: Task, collective: Collective) -> Module:
        """Build the network (``models.ppyoloe.network.Network``) on the bound framework."""
        from mtrain.models.ppyoloe.loss import LossSettings
        from mtrain.models.ppyoloe.network import Network

        o = self.options
        settings = LossSettings(
            class_count=len(task.class_names),
            static_assigner_epoch=o.static_assigner_epoch,
            cls=o.cls,
            iou=o.iou,
            dfl=o.dfl,
        )
        return Network(
            scale=_SCALES[self.variant],
            settings=settings,
            collective=collective,
            deploy=o.deploy,
            plus=self.plus,
            factors=o.factors or ("backbone" if self.plus else "none"),
        )

    @staticmethod
    def fused(weights: Mapping[str, Array]) -> dict[str, Array]:
        """Convert a network's state to that of the same network with option ``deploy``, see ``fusing.fuse``."""
        return fuse(weights)

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Make the start values of the arrays with these names and shapes.

        Convolutions are normal with variance 2 / fan in (He et al. 2015, equation 10); BatchNorms are the identity. The
        last convolutions of the head start at 0, with biases for scores of 0.01 and an even distribution over
        distances.
        """
        return {name: self._initial_value(name, shape, seed) for name, shape in shapes.items()}

    def arranged(self, batch: HostBatch) -> HostBatch:
        """Return the micro batch with its objects by image, ``labels`` and ``boxes``, in place of ``targets``.

        ``epoch`` becomes an entry ``static`` that is there or not, since a value would have to be read from the device.
        """
        labels_BN, boxes_BN4 = group_rows(batch["targets"], shape=batch["images"].shape[:3])
        others = {name: array for name, array in batch.items() if name not in ("targets", "epoch")}
        static = int(batch["epoch"][0]) < self.options.static_assigner_epoch
        # Told by the presence of a name: a value would have to be read from the device in every update.
        marked = {STATIC: np.zeros(1, np.int64)} if static else {}
        return {**others, "labels": labels_BN, "boxes": boxes_BN4, **marked}

    def narrowed(self, output: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Leave out the points without a score above ``confidence``."""
        from mtrain.core import ops
        from mtrain.models.common.narrowing import narrow

        return narrow(output, ops.max(output["scores"], axis=2), above=self.options.confidence)

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Array]:
        """Return the detections of each image: float32 (K, 6) ``[x1, y1, x2, y2, score, class]``, best first.

        Boxes are in pixels of the network's input.
        """
        settings = {name: getattr(self.options, name) for name in _SELECTION}
        pairs = zip(output["boxes"], output["scores"], strict=True)
        return [detections_by_class(boxes_L4, scores_LC, **settings) for boxes_L4, scores_LC in pairs]

    def joined(self, outputs: Sequence[tuple[Mapping[str, Array], Variation]]) -> Mapping[str, Array]:
        """Return the predictions of all copies, in pixels of the original; suppression chooses among them."""
        boxes = []
        for output, variation in outputs:
            boxes_BL4 = np.array(output["boxes"]) / variation.scale
            if variation.mirrored:
                # The left side of a mirrored box is the right one of the original.
                boxes_BL4[..., [0, 2]] = variation.width - boxes_BL4[..., [2, 0]]
            boxes.append(boxes_BL4)
        return {
            "boxes": np.concatenate(boxes, axis=1),
            "scores": np.concatenate([output["scores"] for output, _ in outputs], axis=1),
        }

    def _initial_value(self, name: str, shape: tuple[int, ...], seed: int) -> Array:
        leaf = name.rsplit(".", 1)[-1]
        if name.endswith("proj_conv.weight"):
            return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        if leaf == "num_batches_tracked":
            return np.zeros(shape, np.int64)
        if leaf in ("running_var", "alpha") or name.endswith("bn.weight"):
            return np.ones(shape, np.float32)
        if ".pred_cls." in name and leaf == "bias":
            return np.full(shape, -math.log((1 - _PRIOR) / _PRIOR), np.float32)
        if ".pred_reg." in name and leaf == "bias":
            return np.ones(shape, np.float32)
        if leaf in ("bias", "running_mean") or ".pred_" in name:
            return np.zeros(shape, np.float32)
        in_head_gate = ".stem_" in name and ".fc." in name
        # So small that all gates of the head start half open.
        deviation = _GATE_DEVIATION if in_head_gate else math.sqrt(2 / math.prod(shape[1:]))
        rng = generator_of(name, seed=seed)
        return (rng.standard_normal(shape) * deviation).astype(np.float32)


class PPYOLOEs(PPYOLOE):
    """PP-YOLOE-s: 8.1 million parameters at 80 classes."""

    variant = "s"


class PPYOLOEm(PPYOLOE):
    """PP-YOLOE-m: 24.1 million parameters at 80 classes."""

    variant = "m"


class PPYOLOEl(PPYOLOE):
    """PP-YOLOE-l: 54.1 million parameters at 80 classes."""

    variant = "l"


class PPYOLOEx(PPYOLOE):
    """PP-YOLOE-x: 102.3 million parameters at 80 classes."""

    variant = "x"


class PPYOLOEPluss(PPYOLOEs):
    """PP-YOLOE+-s: 8.1 million parameters at 80 classes."""

    plus = True


class PPYOLOEPlusm(PPYOLOEm):
    """PP-YOLOE+-m: 24.1 million parameters at 80 classes."""

    plus = True


class PPYOLOEPlusl(PPYOLOEl):
    """PP-YOLOE+-l: 54.1 million parameters at 80 classes."""

    plus = True


class PPYOLOEPlusx(PPYOLOEx):
    """PP-YOLOE+-x: 102.3 million parameters at 80 classes."""

    plus = True


_FIRST = ".conv1.conv.weight"
_EPS = 1e-5
"""Epsilon of the BatchNorms that are fused."""


def fuse(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Convert the state of a network with ``blocks.RepConv`` to that of the same network with ``deploy``.

    ``<block>.conv1`` (3x3) and ``<block>.conv2`` (1x1) with their BatchNorms become ``<block>.conv.weight`` and
    ``.bias``, computed in float64, with the factor ``<block>.alpha`` of the second where there is one. Everything else
    stays as it is. Ding et al. 2021, RepVGG, section 3.3.
    """
    blocks = [name.removesuffix(_FIRST) for name in weights if name.endswith(_FIRST)]
    blocks = [block for block in blocks if _sides(weights, block) == [3, 1]]
    branches = tuple(f"{block}.{branch}" for block in blocks for branch in ("conv1.", "conv2.", "alpha"))
    fused: dict[str, Array] = {}
    for name, array in weights.items():
        if not name.startswith(branches):
            fused[name] = array
        elif name.endswith(_FIRST):
            block = name.removesuffix(_FIRST)
            kernel, bias = _branch(weights, f"{block}.conv1")
            point, shift = _branch(weights, f"{block}.conv2")
            factor = np.asarray(weights.get(f"{block}.alpha", 1.0), np.float64)
            # A 1x1 kernel is the centre of a 3x3 kernel.
            kernel[:, :, 1:2, 1:2] += factor * point
            fused[f"{block}.conv.weight"] = kernel.astype(array.dtype)
            fused[f"{block}.conv.bias"] = (bias + factor * shift).astype(array.dtype)
    return fused


def _sides(weights: Mapping[str, Array], block: str) -> list[int]:
    """Return the kernel sizes of a block's two convolutions; [] if it is no such block."""
    names = [f"{block}.{branch}.conv.weight" for branch in ("conv1", "conv2")]
    return [weights[name].shape[-1] for name in names] if all(name in weights for name in names) else []


def _branch(weights: Mapping[str, Array], name: str) -> tuple[Array, Array]:
    """Fuse a convolution with the BatchNorm that follows it; return kernel and bias in float64."""
    kernel = np.asarray(weights[f"{name}.conv.weight"], np.float64)
    gamma, beta, mean, variance = (
        np.asarray(weights[f"{name}.bn.{leaf}"], np.float64)
        for leaf in ("weight", "bias", "running_mean", "running_var")
    )
    scale = gamma / np.sqrt(variance + _EPS)
    return kernel * scale[:, None, None, None], beta - mean * scale
