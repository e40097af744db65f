"""A vision transformer for classification as a model plugin: options, start values, reading of predictions.

Only ``build`` needs a framework.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field

from mtrain.core.interfaces import Array, Collective, Module, PluginOptions, Published, Task
from mtrain.models.common.classifier import Classifier
from mtrain.models.common.start_values import generator_of

_DEVIATION = 0.5
"""Standard deviation of the start values of positions and token.

It is near that of embedded patches, so that positions matter from the first update on.
"""


class ViTOptions(PluginOptions):
    """Options of the vision transformer, given in the spec as ``model.options``."""

    patch: Annotated[int, Field(ge=1)] = 4
    """Side in pixels of the square patches that an image is cut into."""
    width: Annotated[int, Field(ge=1)] = 64
    """Size of a patch's vector; a multiple of ``heads``."""
    depth: Annotated[int, Field(ge=1)] = 4
    """Number of blocks."""
    heads: Annotated[int, Field(ge=1)] = 4
    """Number of attention heads of each block."""
    mlp_ratio: Annotated[int, Field(ge=1)] = 4
    """Hidden size of a block's perceptron, as a multiple of ``width``."""
    pooling: Literal["mean", "token"] = "mean"
    """Input of the classifier: the mean over patches (Beyer et al. 2022, arXiv 2205.01580), or a class token."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as published networks have it. That of the keys has no effect."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread over all classes."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which training drops an element of the embedded patches and of each block's linear maps."""


class ViTTinyOptions(ViTOptions):
    """Options of the vision transformer in the size called tiny (Touvron et al. 2021, arXiv 2012.12877, table 1)."""

    patch: Annotated[int, Field(ge=1)] = 16
    width: Annotated[int, Field(ge=1)] = 192
    depth: Annotated[int, Field(ge=1)] = 12
    heads: Annotated[int, Field(ge=1)] = 3
    pooling: Literal["mean", "token"] = "token"
    qkv_bias: bool = True


class ViTSmallOptions(ViTTinyOptions):
    """Options of the vision transformer in the size called small (Touvron et al. 2021, table 1)."""

    width: Annotated[int, Field(ge=1)] = 384
    heads: Annotated[int, Field(ge=1)] = 6


class ViTBaseOptions(ViTTinyOptions):
    """Options of the vision transformer in the size called base (Dosovitskiy et al. 2021, table 1)."""

    width: Annotated[int, Field(ge=1)] = 768
    heads: Annotated[int, Field(ge=1)] = 12


class ViT(Classifier):
    """The vision transformer as a ``Model`` of ``core.interfaces``: Dosovitskiy et al. 2021 (arXiv 2010.11929)."""

    Options: ClassVar[type[BaseModel]] = ViTOptions
    recomputable: ClassVar[Sequence[str]] = (r"^blocks\.\d+$",)
    imitates: ClassVar[Sequence[str]] = ("outputs",)
    published: ClassVar[Published] = Published(per_class=(r"^head\.(weight|bias)$",))

    options: ViTOptions

    def _problems_of_size(self, task: Task) -> list[str]:
        o, problems = self.options, []
        if task.image_size % o.patch:
            nearest = max(round(task.image_size / o.patch), 1) * o.patch
            problems.append(
                f"data.image_size: {task.image_size} is not a multiple of model.options.patch, {o.patch}; use {nearest}"
            )
        if o.width % o.heads:
            nearest = max(round(o.width / o.heads), 1) * o.heads
            problems.append(
                f"model.options.width: {o.width} is not a multiple of model.options.heads, {o.heads}; use {nearest}"
            )
        return problems

    def build(self, task: Task, collective: Collective | None = None) -> Module:
        """Build the network (``models.vit.network.Network``) on the bound framework."""
        from mtrain.models.vit.network import Network, Shape

        o = self.options
        shape = Shape(
            patch=o.patch,
            patches=(task.image_size // o.patch) ** 2,
            width=o.width,
            depth=o.depth,
            heads=o.heads,
            hidden=o.mlp_ratio * o.width,
            class_count=len(task.class_names),
            qkv_bias=o.qkv_bias,
            dropout=o.dropout,
        )
        return Network(shape, with_token=o.pooling == "token", label_smoothing=o.label_smoothing)

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Make the start values of the arrays with these names and shapes.

        Matrices are uniform in +-sqrt(6 / (inputs + outputs)) (Glorot and Bengio 2010, equation 16), positions and
        token normal, norms the identity, biases 0.
        """
        return {name: _initial_value(name, shape, seed=seed) for name, shape in shapes.items()}


class ViTTiny(ViT):
    """ViT-Ti/16, 5.7 million parameters with 1000 classes at 224 pixels."""

    Options: ClassVar[type[BaseModel]] = ViTTinyOptions


class ViTSmall(ViT):
    """ViT-S/16, 22.1 million parameters with 1000 classes at 224 pixels."""

    Options: ClassVar[type[BaseModel]] = ViTSmallOptions


class ViTBase(ViT):
    """ViT-B/16, 86.6 million parameters with 1000 classes at 224 pixels."""

    Options: ClassVar[type[BaseModel]] = ViTBaseOptions


def _initial_value(name: str, shape: tuple[int, ...], *, seed: int) -> Array:
    rng = generator_of(name, seed=seed)
    if name in ("positions", "token"):
        return rng.normal(0.0, _DEVIATION, size=shape).astype(np.float32)
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    outputs, inputs = shape
    # The matrix for queries, keys and values is three matrices in one, so its outputs count three times.
    bound = math.sqrt(6 / (inputs + (outputs // 3 if name.endswith("qkv.weight") else outputs)))
    return rng.uniform(-bound, bound, size=shape).astype(np.float32)
