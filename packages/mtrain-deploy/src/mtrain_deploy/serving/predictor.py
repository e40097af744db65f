"""What a server asks of a model, and the model of an exported file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.core.interfaces import Array, Model
from mtrain.core.interfaces.live import Found, LiveImages
from mtrain.errors import UsageError
from mtrain.spec.registry import Registry
from mtrain.spec.resolved import Resolved
from mtrain_deploy.exported.metadata import SUPPRESSED
from mtrain_deploy.exported.model import ExportedModel, check_predicts
from mtrain_deploy.serving.tensors import TensorType

if TYPE_CHECKING:
    from mtrain.spec.model import Spec

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}
_STEPS = 100
"""Lowest scores for which a model plugin is kept ready: 0.00, 0.01, ..."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An image as the model takes it."""

    arrays: Mapping[str, Array]
    """Arrays by name, without the batch's axis."""
    size_wh: tuple[int, int]
    """Width and height of the image in pixels, as displayed."""


class Predictor:
    """A file that ``mtrain export --format onnx`` wrote, as a server asks it. Several threads call its members at once.

    Only ``outputs`` is called by one thread at a time.
    """

    def __init__(self, model: ExportedModel, live: LiveImages) -> None:
        self._model, self._live = model, live
        self._metadata, self._registry = model.metadata, Registry.read()
        self._keys = [given.key for given in model.metadata.inputs]
        self._plugin_at = lru_cache(maxsize=_STEPS + 1)(self._plugin)

    @classmethod
    def open(cls, path: Path, *, threads: int | None) -> "Predictor":
        """Open an exported model.

        Args:
            path: The ONNX file.
            threads: Threads that compute; None: one for each usable core.

        Raises:
            CheckpointError: The file is missing, damaged, or mtrain did not write it.
            UsageError: ONNX Runtime is not installed, or nothing can be predicted with such a model.
        """
        model = ExportedModel.open(path, threads=threads)
        metadata = model.metadata
        check_predicts(metadata, name=str(path))
        spec = _spec_of(model)
        live = Resolved.of(spec).task_named(metadata.kind).live(spec, metadata.labels())
        if live is None:
            raise UsageError(
                f"{path}: a model of the task {metadata.kind}, which cannot predict on single images; expected "
                "detection, classification or segmentation"
            )
        predictor = cls(model, live)
        predictor._plugin_at(0)  # a model that is missing here is an error now, not at the first request
        return predictor

    @property
    def batch_size(self) -> int | None:
        """Number of images that the model computes at once; None: any number."""
        first = self._metadata.inputs[0].shape[0]
        return first if isinstance(first, int) else None

    @property
    def name(self) -> str:
        """Name of the model, as a part of a path of HTTP: that of the file without its ending."""
        return self._model.path.stem

    def inputs(self) -> list[TensorType]:
        """Return the inputs of the graph; the first axis of each is that of samples."""
        step = self._metadata.size_step
        return [
            TensorType(given.name, given.dtype, _sizes(given.shape), given.sides, step)
            for given in self._metadata.inputs
        ]

    def results(self) -> list[TensorType]:
        """Return the outputs of the graph."""
        shapes = self._metadata.outputs
        kinds = {given.name: _DTYPES[given.type] for given in self._model.session.get_outputs()}
        return [TensorType(name, kinds[name], _sizes(shape)) for name, shape in shapes.items()]

    def yolo_entries(self) -> dict[str, str]:
        """Return what programs for YOLO models look for in the file."""
        return self._metadata.yolo_entries(size_step=self._model.plugin.size_step)

    def compute(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute the outputs of the graph for its inputs, by their names."""
        return self._model.compute(arrays)

    def description(self) -> dict[str, Any]:
        """Return what clients may know about the model, as plain values: neither paths nor the spec."""
        metadata = self._metadata
        return {
            "file": self._model.path.name,
            "task": metadata.kind,
            "model": metadata.model,
            "class_names": list(metadata.class_names),
            "category_ids": list(metadata.category_ids),
            "image_size": metadata.image_size,
            "precision": metadata.precision,
            "form": metadata.form,
            "weights_sha256": metadata.weights_sha256,
            "mtrain": metadata.mtrain,
        }

    def sample(self, image: Array) -> Sample:
        """Bring an image, uint8 (H, W, 3) RGB, to the form that the model takes."""
        return Sample(self._live.sample(image), (image.shape[1], image.shape[0]))

    def outputs(self, samples: Sequence[Sample]) -> list[Any]:
        """Compute the output for each of some samples, in one batch."""
        batch = {key: np.stack([sample.arrays[key] for sample in samples]) for key in self._keys}
        if self._metadata.form in SUPPRESSED:
            return self._model.predictions(batch)
        output = self._model.outputs(batch)
        return [{name: array[number : number + 1] for name, array in output.items()} for number in range(len(samples))]

    def read(self, output: Any, sample: Sample, *, confidence: float) -> Found:
        """Read from an output what was found with at least this score."""
        prediction = output
        if self._metadata.form not in SUPPRESSED:
            batch = {name: array[None] for name, array in sample.arrays.items()}
            prediction = self._model.read(output, batch, self._plugin_at(math.floor(confidence * _STEPS)))[0]
        return self._live.found(prediction, sample.arrays, size_wh=sample.size_wh, confidence=confidence)

    def draw(self, image: Array, found: Found, *, confidence: float) -> Array:
        """Return a copy of an image with what was found in it."""
        return self._live.drawn(image, found, confidence=confidence)

    def _plugin(self, step: int) -> Model:
        """Return the model plugin that leaves out scores below ``step`` hundredths, where it selects predictions itself."""
        name, options = self._metadata.model, dict(self._metadata.options)
        if "confidence" in options:
            # Suppression of a box depends only on boxes with better scores, so the lowest score changes no other
            # prediction. It saves time: thousands of boxes have a score near zero.
            options["confidence"] = max(step / _STEPS, options["confidence"])
        plugin: Model = self._registry.make("models", name, options, path="model.options")
        return plugin


def _sizes(shape: Sequence[int | str]) -> tuple[int, ...]:
    """Return a shape in which -1 stands for any size; the exporter writes 0 for one that it does not know."""
    return tuple(size if isinstance(size, int) and size else -1 for size in shape)


def _spec_of(model: ExportedModel) -> "Spec":
    """Return the spec of an exported model with the size of its input."""
    spec, side = model.spec(), model.metadata.image_size
    if not side or spec.data.input_side == side:
        return spec
    return spec.model_copy(update={"data": spec.data.model_copy(update={"image_size": side})})
