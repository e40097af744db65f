"""YOLOv5 n, s, m, l and x as model plugins: options, anchors, start values, reading of predictions.

Only ``build`` needs a framework.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field, field_validator

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
from mtrain.models.common.nms import Selection, detections
from mtrain.models.common.start_values import generator_of
from mtrain.models.yolov5 import anchors as fitting
from mtrain.models.yolov5.loss import START_BALANCE, LossSettings

STRIDES = (8, 16, 32)
COCO_ANCHORS = (
    ((10.0, 13.0), (16.0, 30.0), (33.0, 23.0)),
    ((30.0, 61.0), (62.0, 45.0), (59.0, 119.0)),
    ((116.0, 90.0), (156.0, 198.0), (373.0, 326.0)),
)
"""Anchors (width, height) in pixels, by level, for boxes like COCO's at an image size of 640."""
_SCALES = {"n": (0.33, 0.25), "s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}
"""(depth, width) of each variant."""
_ANCHOR_SEED = 0
_SELECTION = ("confidence", "iou_threshold", "max_detections", "multi_label", "class_agnostic")


class YOLOv5Options(PluginOptions):
    """Options of the YOLOv5 models, given in the spec as ``model.options``."""

    anchors: Literal["auto"] | list[list[tuple[float, float]]] | None = None
    """Anchors in pixels at ``image_size``: 3 levels of 3 (width, height), small to large.

    "auto": always computed from the data; None: COCO's.
    """
    autoanchor: bool = True
    """Compute anchors from the data if COCO's match at most 98% of its boxes."""
    anchor_threshold: Annotated[float, Field(gt=1)] = 4.0
    """An anchor matches a box if both sides are within this factor."""
    box: Annotated[float, Field(ge=0)] = 0.05
    obj: Annotated[float, Field(ge=0)] = 1.0
    cls: Annotated[float, Field(ge=0)] = 0.5
    """``box``, ``obj``, ``cls``: gains of the three losses; with ``scale_gains``, those for 640 px and 80 classes."""
    scale_gains: bool = True
    """Multiply ``obj`` by (image_size / 640)^2 and ``cls`` by (classes / 80)."""
    cls_pw: Annotated[float, Field(gt=0)] = 1.0
    obj_pw: Annotated[float, Field(gt=0)] = 1.0
    """``cls_pw`` and ``obj_pw`` are the weights of positive targets in the two cross entropies."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    fl_gamma: Annotated[float, Field(ge=0)] = 0.0
    """Gamma of the focal loss; 0 is plain cross entropy."""
    autobalance: bool = False
    """Adapt the weights of the levels' objectness losses during training."""
    confidence: Annotated[float, Field(ge=0, lt=1)] = 0.001
    """Predictions with this score or a lower one are dropped."""
    iou_threshold: Annotated[float, Field(gt=0, le=1)] = 0.6
    """A prediction that overlaps a better one by more than this is dropped."""
    max_detections: Annotated[int, Field(ge=1)] = 300
    """Largest number of detections per image."""
    multi_label: bool = True
    """A box may be reported for several classes."""
    class_agnostic: bool = False
    """Boxes of different classes suppress each other."""

    @field_validator("anchors")
    @classmethod
    def _three_levels_of_three(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        shape = [len(level) for level in value]
        if shape != [3, 3, 3]:
            raise ValueError(
                f"levels of {shape} anchors; give 3 levels (strides 8, 16, 32) of 3 [width, height] in pixels"
            )
        if min(side for level in value for anchor in level for side in anchor) <= 0:
            raise ValueError("an anchor has a side of 0 px or less; give widths and heights in pixels")
        areas = [sum(w * h for w, h in level) for level in value]
        if areas != sorted(areas):
            raise ValueError(
                "the anchors of a level are smaller than those of the level before; list the smallest level first"
            )
        return value


class YOLOv5(Detector):
    """YOLOv5 as a ``Model`` of ``core.interfaces``. Subclasses name the variant."""

    Options: ClassVar[type[BaseModel]] = YOLOv5Options
    design: ClassVar[str] = "YOLOv5"
    recomputable: ClassVar[Sequence[str]] = (r"^model\.(?!(?:11|12|15|16|19|22|24)$)\d+$",)
    published: ClassVar[Published] = Published(
        left_out=(r"^balance\.moved_L$",),
        per_class=(r"^model\.24\.m\.\d\.(weight|bias)$",),
        of_data=(r"^model\.24\.anchors$",),
    )
    variant: ClassVar[str]

    options: YOLOv5Options

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Return the task with ``anchors`` (pixels, 3 x 3 x 2, as lists) and ``anchor_report`` added to its details.

        Args:
            task: Image size, class names and details.
            statistics: ``boxes_wh_px``, sizes (N, 2) of the training boxes in pixels at ``image_size``; ``class_count``
                of the data, optional.

        Raises:
            SpecError: The image size or the class names do not fit.
        """
        super().prepare_task(task, statistics)
        boxes = np.asarray(statistics.get("boxes_wh_px", ()), np.float64).reshape(-1, 2)
        # Boxes without an area match no anchor, and have no ratio to one.
        boxes = boxes[(boxes > 0).all(axis=1)]
        option, threshold = self.options.anchors, self.options.anchor_threshold
        current = np.asarray(option if isinstance(option, list) else COCO_ANCHORS, np.float64)
        if option == "auto" or (option is None and self.options.autoanchor):
            anchors, report = fitting.choose(
                boxes, current, threshold=threshold, always=option == "auto", seed=_ANCHOR_SEED
            )
        else:
            recall = fitting.recall(boxes, current.reshape(-1, 2), threshold=threshold)
            anchors = current
            report = {"recall_before": recall, "recall_after": recall, "changed": False, "reason": "as the spec says"}
        rounded = np.round(anchors, 2).tolist()
        return replace(
            task, details={**task.details, "anchors": rounded, "anchor_report": {**report, "boxes": len(boxes)}}
        )

    def build(self, task: Task, collective: Collective | None = None) -> Module:
        """Build the network (``models.yolov5.network.Network``) on the bound framework, with the task's anchors."""
        from mtrain.models.yolov5.network import Network

        depth, width = _SCALES[self.variant]
        return Network(depth=depth, width=width, anchors_px=self._anchors(task), settings=self.loss_settings(task))

    def loss_settings(self, task: Task) -> LossSettings:
        """Return the settings of the loss, with gains scaled to the task.

        ``gain`` is the global batch, because YOLOv5 sums its loss over the images of an update, while mtrain's
        optimizers average gradients.
        """
        o, classes = self.options, len(task.class_names)
        size_scale = (task.image_size / 640) ** 2 if o.scale_gains else 1.0
        class_scale = classes / 80 if o.scale_gains else 1.0
        return LossSettings(
            class_count=classes,
            box=o.box,
            obj=o.obj * size_scale,
            cls=o.cls * class_scale,
            anchor_threshold=o.anchor_threshold,
            cls_pw=o.cls_pw,
            obj_pw=o.obj_pw,
            label_smoothing=o.label_smoothing,
            fl_gamma=o.fl_gamma,
            autobalance=o.autobalance,
            gain=float(task.global_batch),
        )

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Make the start values of the arrays with these names and shapes.

        Convolutions are uniform in +-1/sqrt(fan in); BatchNorms are the identity. The biases of the heads start at
        expected rates (Lin et al. 2017, section 4.1): eight objects in an image of 640 px, each class at 0.6 /
        classes.
        """
        values = {name: self._initial_value(name, shape, shapes, task, seed) for name, shape in shapes.items()}
        for level, stride in enumerate(STRIDES):
            bias = values.get(f"model.24.m.{level}.bias")
            if bias is not None:
                # A view, so that the array in ``values`` changes: a row for each anchor, objectness before the
                # classes.
                rows = bias.reshape(3, -1)
                rows[:, 4] += math.log(8 / (640 / stride) ** 2)
                rows[:, 5:] += math.log(0.6 / (len(task.class_names) - 0.99999))
        return values

    def narrowed(self, output: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Leave out the rows without a score above ``confidence``, objectness times class score."""
        from mtrain.core import ops
        from mtrain.models.common.narrowing import narrow

        decoded_BNC = output["decoded"]
        score_BN = ops.max(decoded_BNC[:, :, 5:], axis=2) * decoded_BNC[:, :, 4]
        return narrow(output, score_BN, above=self.options.confidence)

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Array]:
        """Return the detections of each image: float32 (K, 6) ``[x1, y1, x2, y2, score, class]``, best first.

        Boxes are in pixels of the network's input.
        """
        settings = {name: getattr(self.options, name) for name in _SELECTION}
        selection = Selection(**settings)
        return [detections(decoded_NC, selection) for decoded_NC in output["decoded"]]

    def joined(self, outputs: Sequence[tuple[Mapping[str, Array], Variation]]) -> Mapping[str, Array]:
        """Return the predictions of all copies, in pixels of the original; suppression chooses among them."""
        parts = []
        for output, variation in outputs:
            decoded_BNC = np.array(output["decoded"])
            # In pixels of the original, in which all copies can be compared.
            decoded_BNC[..., :4] /= variation.scale
            if variation.mirrored:
                decoded_BNC[..., 0] = variation.width - decoded_BNC[..., 0]
            parts.append(decoded_BNC)
        return {"decoded": np.concatenate(parts, axis=1)}

    def _anchors(self, task: Task) -> Array:
        default = self.options.anchors if isinstance(self.options.anchors, list) else COCO_ANCHORS
        return np.asarray(task.details.get("anchors", default), np.float32)

    def _initial_value(
        self, name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], task: Task, seed: int
    ) -> Array:
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "anchors":
            return self._anchors(task) / np.asarray(STRIDES, np.float32)[:, None, None]
        if leaf == "moved_L":
            return np.asarray(START_BALANCE, np.float64)
        if leaf == "num_batches_tracked":
            return np.zeros(shape, np.int64)
        if leaf == "running_var" or name.endswith("bn.weight"):
            return np.ones(shape, np.float32)
        if leaf == "running_mean" or name.endswith("bn.bias"):
            return np.zeros(shape, np.float32)
        kernel = shape if leaf == "weight" else shapes[name.removesuffix("bias") + "weight"]
        bound = 1 / math.sqrt(math.prod(kernel[1:]))
        rng = generator_of(name, seed=seed)
        return rng.uniform(-bound, bound, size=shape).astype(np.float32)


class YOLOv5n(YOLOv5):
    """YOLOv5n: 1.9 million parameters at 80 classes."""

    variant = "n"


class YOLOv5s(YOLOv5):
    """YOLOv5s: 7.2 million parameters at 80 classes."""

    variant = "s"


class YOLOv5m(YOLOv5):
    """YOLOv5m: 21.2 million parameters at 80 classes."""

    variant = "m"


class YOLOv5l(YOLOv5):
    """YOLOv5l: 46.6 million parameters at 80 classes."""

    variant = "l"


class YOLOv5x(YOLOv5):
    """YOLOv5x: 86.7 million parameters at 80 classes."""

    variant = "x"
