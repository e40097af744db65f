"""A predictor without a model: what it finds is the colour of the image."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.interfaces.live import Found
from mtrain_deploy.serving.predictor import Sample
from mtrain_deploy.serving.tensors import TensorType

COLOURS = ("red", "green", "blue")


class Colours:
    """Answers as a ``Predictor`` does: one row with the colour of the largest mean, whose share of 255 is the score."""

    batch_size = None
    name = "colours"

    def inputs(self) -> Sequence[TensorType]:
        return [TensorType("images", "uint8", (-1, -1, -1, 3), (1, 2))]

    def results(self) -> Sequence[TensorType]:
        return [TensorType("means", "float32", (-1, 3))]

    def compute(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"means": arrays["images"].mean((1, 2), dtype=np.float32)}

    def description(self) -> dict[str, Any]:
        return {"model": "colours"}

    def sample(self, image: Array) -> Sample:
        return Sample({"mean_C": image.mean((0, 1))}, (image.shape[1], image.shape[0]))

    def outputs(self, samples: Sequence[Sample]) -> list[Any]:
        return [sample.arrays["mean_C"] / 255 for sample in samples]

    def read(self, output: Any, sample: Sample, *, confidence: float) -> Found:
        best = int(np.argmax(output))
        return Found([{"class": COLOURS[best], "score": float(output[best])}])

    def draw(self, image: Array, found: Found, *, confidence: float) -> Array:
        return image
