"""Residual networks for classification as model plugins: options, start values, reading of predictions.

Only ``build`` needs a framework.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BaseModel, Field

from mtrain.core.interfaces import Array, Collective, Module, PluginOptions, Published, Task
from mtrain.models.common.classifier import Classifier
from mtrain.models.common.start_values import generator_of

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of red, green and blue over ImageNet, in 0..1, with which published weights were trained."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation of red, green and blue over ImageNet, in 0..1."""
_PositiveFloat = Annotated[float, Field(gt=0)]


class ResNetOptions(PluginOptions):
    """Options of the residual networks, given in the spec as ``model.options``."""

    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Mean of red, green and blue in 0..1, subtracted from pixels; the default is that of ImageNet."""
    std: tuple[_PositiveFloat, _PositiveFloat, _PositiveFloat] = IMAGENET_STD
    """Standard deviation of red, green and blue in 0..1, by which pixels are divided; the default is that of ImageNet."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread over all classes."""
    zero_last_norm: bool = False
    """Start the last BatchNorm of each block at 0, so that every block starts as its shortcut (Goyal et al. 2017, section
    5.1)."""


class ResNet(Classifier):
    """A residual network as a ``Model`` of ``core.interfaces``: He et al. 2015 (arXiv 1512.03385).

    Its parameters have the names and shapes of torchvision's, so that files of its weights can be used.
    """

    Options: ClassVar[type[BaseModel]] = ResNetOptions
    recomputable: ClassVar[Sequence[str]] = (r"^layer\d\.\d+$",)
    imitates: ClassVar[Sequence[str]] = ("outputs", "features")
    size_step: int = 1
    published: ClassVar[Published] = Published(per_class=(r"^fc\.(weight|bias)$",))
    blocks: ClassVar[tuple[int, int, int, int]]
    """Number of blocks of each stage."""
    bottleneck: ClassVar[bool]
    """Whether blocks have three convolutions; else two."""

    options: ResNetOptions

    def build(self, task: Task, collective: Collective | None = None) -> Module:
        """Build the network (``models.resnet.network.Network``) on the bound framework."""
        from mtrain.models.resnet.network import Network, Shape

        options = self.options
        shape = Shape(
            blocks=self.blocks,
            bottleneck=self.bottleneck,
            class_count=len(task.class_names),
            mean=options.mean,
            std=options.std,
        )
        return Network(shape, label_smoothing=options.label_smoothing)

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Make the start values of the arrays with these names and shapes.

        Convolutions are normal with the variance 2 / (outputs * kernel area) (He et al. 2015, arXiv 1502.01852, section
        2.2, backward case), the classifier is uniform in +-1 / sqrt(inputs) with bias 0, BatchNorms are the
        identity.
        """
        values = {name: _initial_value(name, shape, seed=seed) for name, shape in shapes.items()}
        if self.options.zero_last_norm:
            last = f".bn{3 if self.bottleneck else 2}.weight"
            values |= {name: np.zeros_like(value) for name, value in values.items() if name.endswith(last)}
        return values


class ResNet18(ResNet):
    """ResNet-18, 11.7 million parameters with 1000 classes."""

    blocks = (2, 2, 2, 2)
    bottleneck = False


class ResNet34(ResNet):
    """ResNet-34, 21.8 million parameters with 1000 classes."""

    blocks = (3, 4, 6, 3)
    bottleneck = False


class ResNet50(ResNet):
    """ResNet-50, 25.6 million parameters with 1000 classes."""

    blocks = (3, 4, 6, 3)
    bottleneck = True


def _initial_value(name: str, shape: tuple[int, ...], *, seed: int) -> Array:
    rng = generator_of(name, seed=seed)
    leaf = name.rpartition(".")[2]
    if leaf == "num_batches_tracked":
        return np.zeros(shape, np.int64)
    if name.startswith("fc."):
        return np.zeros(shape, np.float32) if leaf == "bias" else _uniform(rng, shape, 1 / math.sqrt(shape[1]))
    if len(shape) == 4:
        deviation = math.sqrt(2 / (shape[0] * shape[2] * shape[3]))
        return (deviation * rng.standard_normal(shape)).astype(np.float32)
    return np.zeros(shape, np.float32) if leaf in ("bias", "running_mean") else np.ones(shape, np.float32)


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float) -> Array:
    return rng.uniform(-bound, bound, shape).astype(np.float32)
