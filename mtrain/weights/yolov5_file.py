"""Write weights of YOLOv5 as the ``.pt`` that its own programs load: a pickled tree of modules.

YOLOv5's ``detect.py``, ``val.py``, ``export.py`` and ``train.py`` read a checkpoint whose ``model`` is an object of its class. A pickle
mentions classes by name, so none of YOLOv5's or of torch's code is needed to write one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError
from mtrain.spec.importers.yolov5 import BACKBONE_LAYERS, LAYERS, VARIANTS
from mtrain.weights import pickling
from mtrain.weights.writing import archive_bytes, tensor

_STRIDES = np.asarray([8, 16, 32], np.float32)
_TORCH = {
    "Conv2d": "conv", "BatchNorm2d": "batchnorm", "SiLU": "activation", "MaxPool2d": "pooling", "Upsample": "upsampling",
    "Sequential": "container", "ModuleList": "container",
}  # fmt: skip
"""Part of ``torch.nn.modules`` by class; other classes are YOLOv5's."""
_HEADS = ("Detect", "DetectionModel")
"""Classes in YOLOv5's ``models.yolo``; its others are in ``models.common``."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "anchors")


def check_model(model: str) -> tuple[float, float]:
    """Return the factors (depth, width) of a variant of YOLOv5.

    Raises:
        CheckpointError: The model is another one.
    """
    for factors, variant in VARIANTS.items():
        if model == f"yolov5{variant}":
            return factors
    raise CheckpointError(
        f"--format yolov5: the weights are of {model}, and YOLOv5's programs run yolov5n to yolov5x; leave it out"
    )


def pt_bytes(model: str, arrays: Mapping[str, Array], *, class_names: Sequence[str] = ()) -> bytes:
    """Return the content of a checkpoint of YOLOv5 with all ``arrays`` of ``model``, by name.

    Where there is no name for each class, its number is its name.
    """
    tree = _Tree(arrays)
    network = tree.network(check_model(model), class_names)
    rest = dict.fromkeys(("best_fitness", "ema", "updates", "optimizer", "opt", "date"))
    return archive_bytes(_dictionary({"epoch": -1, "model": network, **rest}), tree.storages)


class _Tree:
    """Makes the instructions for modules, and collects the arrays in the order in which these mention them."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self.storages: list[Array] = []

    def network(self, factors: tuple[float, float], class_names: Sequence[str]) -> bytes:
        """Return the whole network, with the description from which YOLOv5's training builds it again."""
        anchors_LA2 = self._arrays["model.24.anchors"]
        classes = len(self._arrays["model.24.m.0.bias"]) // anchors_LA2.shape[1] - 5
        rows = [[list(part) if isinstance(part, tuple) else part for part in row] for row in LAYERS]
        description = {
            "nc": classes,
            "ch": 3,
            "depth_multiple": factors[0],
            "width_multiple": factors[1],
            "anchors": [level.ravel().tolist() for level in anchors_LA2 * _STRIDES[:, None, None]],
            "backbone": rows[:BACKBONE_LAYERS],
            "head": rows[BACKBONE_LAYERS:],
        }
        names = class_names if len(class_names) == classes else [str(label) for label in range(classes)]
        layers = {str(i): self._layer(f"model.{i}.", row, i) for i, row in enumerate(LAYERS)}
        sources = {int(source) for row in LAYERS for source in np.atleast_1d(row[0])} - {-1}
        return self._module(
            "DetectionModel", children={"model": self._module("Sequential", children=layers)}, yaml=description,
            names=dict(enumerate(names)), nc=classes, inplace=True, save=sorted(sources), stride=self._tensor(_STRIDES),
        )  # fmt: skip

    def _layer(self, path: str, row: Sequence[Any], position: int) -> bytes:
        """Return a layer, with what YOLOv5's loop over layers reads: its number, source, class and number of parameters."""
        source, _, kind, arguments = row
        parameters = [a for name, a in self._arrays.items() if name.startswith(path) and not name.endswith(_BUFFERS)]
        common = {
            "i": position,
            "f": source if source == -1 else list(source),
            "type": kind,
            "np": sum(a.size for a in parameters),
        }
        if kind == "Conv":
            return self._conv(path, *arguments[2:], **common)
        if kind == "Detect":
            return self._detect(path, common)
        if kind == "Concat":
            return self._module(kind, **common, d=1)
        if kind == "nn.Upsample":
            unset = dict.fromkeys(("size", "align_corners", "recompute_scale_factor"))
            return self._module("Upsample", **common, **unset, scale_factor=2.0, mode="nearest")
        pool: dict[str, Any] = {
            "kernel_size": 5,
            "stride": 1,
            "padding": 2,
            "dilation": 1,
            "return_indices": False,
            "ceil_mode": False,
        }
        blocks = self._blocks(f"{path}m.", adds=len(arguments) == 1)
        inner = self._module("MaxPool2d", **pool) if kind == "SPPF" else self._module("Sequential", children=blocks)
        return self._module(kind, children={**self._convs(path), "m": inner}, **common)

    def _blocks(self, path: str, *, adds: bool) -> dict[str, bytes]:
        count = sum(name.startswith(path) and name.endswith("cv1.conv.weight") for name in self._arrays)
        return {str(i): self._module("Bottleneck", children=self._convs(f"{path}{i}."), add=adds) for i in range(count)}

    def _convs(self, path: str) -> dict[str, bytes]:
        parts = [part for part in ("cv1", "cv2", "cv3") if f"{path}{part}.conv.weight" in self._arrays]
        return {part: self._conv(f"{path}{part}.") for part in parts}

    def _detect(self, path: str, common: Mapping[str, Any]) -> bytes:
        levels, per_level, _ = self._arrays[f"{path}anchors"].shape
        outputs = len(self._arrays[f"{path}m.0.bias"]) // per_level
        heads = {str(level): self._conv2d(f"{path}m.{level}.") for level in range(levels)}
        # Replaced at the first image, whose size they depend on.
        grids = b"](" + b"".join(self._tensor(np.zeros(1, np.float32)) for _ in range(levels)) + b"e"
        return self._module(
            "Detect", path, children={"m": self._module("ModuleList", children=heads)}, **common, inplace=True,
            nc=outputs - 5, no=outputs, nl=levels, na=per_level, stride=self._tensor(_STRIDES), grid=grids, anchor_grid=grids,
        )  # fmt: skip

    def _conv(self, path: str, stride: int = 1, padding: int | None = None, **attributes: Any) -> bytes:
        """Return a convolution with its BatchNorm and activation."""
        norm: dict[str, Any] = {"eps": 1e-3, "momentum": 0.03, "affine": True, "track_running_stats": True}
        children = {
            "conv": self._conv2d(f"{path}conv.", stride, padding),
            "bn": self._module("BatchNorm2d", f"{path}bn.", num_features=len(self._arrays[f"{path}bn.weight"]), **norm),
            "act": self._module("SiLU", inplace=True),
        }
        return self._module("Conv", children=children, **attributes)

    def _conv2d(self, path: str, stride: int = 1, padding: int | None = None) -> bytes:
        outputs, inputs, *kernel = self._arrays[f"{path}weight"].shape
        padding = kernel[0] // 2 if padding is None else padding
        return self._module(
            "Conv2d", path, in_channels=inputs, out_channels=outputs, kernel_size=tuple(kernel), stride=(stride,) * 2,
            padding=(padding,) * 2, dilation=(1, 1), groups=1, transposed=False, output_padding=(0, 0), padding_mode="zeros",
            _reversed_padding_repeated_twice=[padding] * 4,
        )  # fmt: skip

    def _module(
        self, kind: str, path: str | None = None, *, children: Mapping[str, bytes] | None = None, **attributes: Any
    ) -> bytes:
        """Return a module that has the arrays with one part of a name after ``path``."""
        parameters, buffers = {}, {}
        for name, array in self._arrays.items():
            leaf = name.removeprefix(path or "-")
            if leaf != name and "." not in leaf:
                if leaf in _BUFFERS:
                    buffers[leaf] = self._tensor(array)
                else:
                    parts = (self._tensor(array), pickling.TRUE, pickling.EMPTY)
                    parameters[leaf] = pickling.call(pickling.name("torch._utils", "_rebuild_parameter"), *parts)
        if kind == "Conv2d":
            parameters.setdefault("bias", pickling.NONE)
        hooks = dict.fromkeys(("_backward_hooks", "_forward_hooks", "_forward_pre_hooks"), pickling.EMPTY)
        own = {"_parameters": _ordered(parameters), "_buffers": _ordered(buffers), "_modules": _ordered(children or {})}
        part = (
            f"torch.nn.modules.{_TORCH[kind]}" if kind in _TORCH else f"models.{'yolo' if kind in _HEADS else 'common'}"
        )
        state = _dictionary({"training": False, **own, **hooks, **attributes})
        return pickling.record(pickling.name(part, kind), state)

    def _tensor(self, array: Array) -> bytes:
        self.storages.append(array)
        return tensor("the network", array, key=len(self.storages) - 1)


def _ordered(entries: Mapping[str, bytes]) -> bytes:
    return pickling.EMPTY + b"(" + b"".join(pickling.plain(name) + value for name, value in entries.items()) + b"u"


def _dictionary(entries: Mapping[str, Any]) -> bytes:
    """Return the instructions for a dictionary of plain values and of values that are instructions already."""
    encoded = {name: value if isinstance(value, bytes) else pickling.plain(value) for name, value in entries.items()}
    return pickling.dictionary({pickling.plain(name): value for name, value in encoded.items()})
