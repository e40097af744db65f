"""ConvNeXt as model plugins: options, start values, reading of predictions. Only `build` needs a framework."""

import zlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from mtrain.core.interfaces import Array, Collective, HostBatch, Model, Module, Published, Task
from mtrain.errors import SpecError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Mean of red, green and blue over ImageNet, in 0..1, with which published weights were trained."""
IMAGENET_STD = (0.229, 0.224, 0.225)
SMALLEST_SIDE = 32
"""Side of an image in pixels that leaves one pixel after a stem of 4 and three halvings."""
_Positive = Annotated[float, Field(gt=0)]


class ConvNeXt(Model):
    """A ConvNeXt of some size: Liu et al. 2022 (arXiv 2201.03545). Parameters have the names of its first release."""

    class Options(BaseModel):
        """The keys of `model.options`."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        drop_path: float = Field(
            default=0.0, ge=0, lt=1, description="probability with which the last block is skipped; 0 at the first one"
        )
        layer_scale: float = Field(default=1e-6, gt=0, description="start value of the scale of each block's branch")
        label_smoothing: float = Field(
            default=0.0, ge=0, lt=1, description="share of the target spread over all classes"
        )
        mean: tuple[float, float, float] = Field(default=IMAGENET_MEAN, description="subtracted from pixels in 0..1")
        std: tuple[_Positive, _Positive, _Positive] = Field(
            default=IMAGENET_STD, description="by which pixels are divided then"
        )

    kind: ClassVar[str] = "classification"
    published: ClassVar[Published] = Published(per_class=(r"^head\.(weight|bias)$",))
    depths: ClassVar[tuple[int, int, int, int]]
    """Number of blocks of each stage."""
    widths: ClassVar[tuple[int, int, int, int]]
    """Channels of each stage."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @override
    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        if task.image_size < SMALLEST_SIDE:
            raise SpecError(f"data.image_size: {task.image_size} given, and ConvNeXt needs {SMALLEST_SIDE} or more")
        return task

    @override
    def build(self, task: Task, collective: Collective) -> Module:
        from mtrain_convnext.network import Network, Shape

        shape = Shape(depths=self.depths, widths=self.widths, class_count=len(task.class_names))
        return Network(shape, self.options)

    @override
    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        return {name: self._initial(name, shape, seed=seed) for name, shape in shapes.items()}

    def _initial(self, name: str, shape: tuple[int, ...], *, seed: int) -> Array:
        """Draw an array from a generator of its own: normal weights cut off at two deviations (appendix A.1)."""
        if name.endswith(".gamma"):
            return np.full(shape, self.options.layer_scale, np.float32)
        if name.endswith(".bias"):
            return np.zeros(shape, np.float32)
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        rng = np.random.Generator(np.random.PCG64((seed, zlib.crc32(name.encode()))))
        return (0.02 * np.clip(rng.standard_normal(shape), -2, 2)).astype(np.float32)

    @override
    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Array]:
        return [np.asarray(row_C, np.float32) for row_C in output["probabilities"]]


class ConvNeXtAtto(ConvNeXt):
    """ConvNeXt-Atto of Woo et al. 2023 (arXiv 2301.00808), 3.7 million parameters with 1000 classes."""

    depths = (2, 2, 6, 2)
    widths = (40, 80, 160, 320)


class ConvNeXtTiny(ConvNeXt):
    """ConvNeXt-T, 28.6 million parameters with 1000 classes."""

    depths = (3, 3, 9, 3)
    widths = (96, 192, 384, 768)


class ConvNeXtSmall(ConvNeXt):
    """ConvNeXt-S, 50.2 million parameters with 1000 classes."""

    depths = (3, 3, 27, 3)
    widths = (96, 192, 384, 768)
