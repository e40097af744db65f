"""What plugins of segmentation models share: options, checks, start values, reading of predictions. Needs no framework."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from mtrain.core.interfaces import Array, HostBatch, Model, PluginOptions, Published, Task
from mtrain.errors import SpecError
from mtrain.models.common.start_values import generator_of

_PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class HardPixels(PluginOptions):
    """Online hard example mining (OHEM): only pixels that a model finds hard have a part in the cross entropy."""

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """A pixel is hard if its own class has at most this probability."""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.0625
    """Share of an image's pixels that count at least, the hardest ones."""


class LossOptions(PluginOptions):
    """The options of a segmentation model's loss."""

    class_weights: tuple[_PositiveFloat, ...] | None = None
    """Weight of a pixel of each class in the cross entropy, in the order of the classes; null: 1 for all."""
    ohem: HardPixels | None = None
    """Only hard pixels have a part in the cross entropy; null: all."""
    dice: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the dice loss, which is added to the cross entropy."""


class SegmenterOptions(PluginOptions):
    """Options of every segmentation model, given in the spec as ``model.options``."""

    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of red, green and blue in 0..1, subtracted from pixels; the default is that of ImageNet."""
    std: tuple[_PositiveFloat, _PositiveFloat, _PositiveFloat] = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue in 0..1, by which pixels are divided; the default is that of ImageNet."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread over all classes."""
    loss: LossOptions = LossOptions()
    """What is minimised; by default the mean cross entropy of the pixels."""


class Segmenter(Model):
    """A segmentation model but for its network."""

    kind: ClassVar[str] = "segmentation"
    imitates: ClassVar[Sequence[str]] = ("outputs",)
    published: ClassVar[Published] = Published(per_class=(r"^(classifier|auxiliary)\.(weight|bias)$",))

    @property
    def stride(self) -> int:
        """Number of which the side of the input must be a multiple."""
        raise NotImplementedError

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Check that the task fits, and return it unchanged: nothing in these models depends on the data.

        Raises:
            SpecError: The image size is not a multiple of ``stride``, there are fewer than two classes, or not as many as
                class weights.
        """
        problems = []
        if task.image_size % self.stride:
            nearest = max(round(task.image_size / self.stride), 1) * self.stride
            problems.append(
                f"data.image_size: {task.image_size} is not a multiple of {self.stride} as this model needs; use {nearest}"
            )
        if len(task.class_names) < 2:
            problems.append(
                f"data: {len(task.class_names)} classes; segmentation needs at least two, with the background"
            )
        weights = self.options.loss.class_weights
        if weights is not None and len(weights) != len(task.class_names):
            problems.append(
                f"model.options.loss.class_weights: {len(weights)} weights given, the data has {len(task.class_names)} "
                f"classes: {', '.join(task.class_names)}"
            )
        if problems:
            raise SpecError(problems)
        return task

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Make the start values of the arrays with these names and shapes.

        Convolutions are normal with the variance 2 / fan in (He et al. 2015, arXiv 1502.01852, equation 10), the classifier
        with 1 / fan in; BatchNorms are the identity, biases 0.
        """
        return {name: _initial_value(name, shape, seed=seed) for name, shape in shapes.items()}

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[dict[str, Array]]:
        """Return for each image ``classes`` and ``certainty``, both uint8 (S, S); see ``pixels.predict_classes``."""
        maps = {name: np.asarray(output[name], np.uint8) for name in ("classes", "certainty")}
        return [{name: values[i] for name, values in maps.items()} for i in range(len(maps["classes"]))]


def _initial_value(name: str, shape: tuple[int, ...], *, seed: int) -> Array:
    leaf = name.rpartition(".")[2]
    if leaf == "num_batches_tracked":
        return np.zeros(shape, np.int64)
    if len(shape) == 4:
        rng = generator_of(name, seed=seed)
        # A transposed convolution has its inputs first, and each output pixel sees one of its kernel's places.
        fan_in = shape[0] if name.endswith("rise.weight") else math.prod(shape[1:])
        gain = 1.0 if name.startswith(("classifier.", "auxiliary.")) else 2.0
        return (math.sqrt(gain / fan_in) * rng.standard_normal(shape)).astype(np.float32)
    return np.zeros(shape, np.float32) if leaf in ("bias", "running_mean") else np.ones(shape, np.float32)
