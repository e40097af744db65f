"""The model plugin `integral_pose`: heatmaps whose mean place is the point. Only `build` needs a framework."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from mtrain.core.interfaces import Array, Collective, HostBatch, Model, Module, Task
from mtrain.errors import SpecError

STRIDE = 8
"""The side of the input must be a multiple of it."""


class IntegralPose(Model):
    """Convolutions down to an eighth, two transposed ones up to a half (Xiao et al. 2018, arXiv 1804.06208), and the mean
    place of each heatmap as the point (Sun et al. 2018, arXiv 1711.08229)."""

    class Options(BaseModel):
        """The keys of `model.options`."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        width: int = Field(
            default=32, ge=8, multiple_of=8, description="channels of the first stage; each next has twice as many"
        )

    kind: ClassVar[str] = "keypoints"

    def __init__(self, options: Options) -> None:
        self.options = options

    @override
    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        if task.image_size % STRIDE:
            raise SpecError(f"data.image_size: {task.image_size} given, and integral_pose needs a multiple of {STRIDE}")
        return task

    @override
    def build(self, task: Task, collective: Collective) -> Module:
        from mtrain_keypoints.network import Network

        return Network(width=self.options.width, points=len(task.class_names), collective=collective)

    @override
    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        return {name: _initial(name, shape, seed=seed) for name, shape in shapes.items()}

    @override
    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Array]:
        return [np.asarray(points_K3, np.float64) for points_K3 in output["points"]]


def _initial(name: str, shape: tuple[int, ...], *, seed: int) -> Array:
    leaf = name.rpartition(".")[2]
    if leaf == "num_batches_tracked":
        return np.zeros(shape, np.int64)
    if len(shape) == 1:
        return np.zeros(shape, np.float32) if leaf in ("bias", "running_mean") else np.ones(shape, np.float32)
    rng = np.random.Generator(np.random.PCG64((seed, zlib.crc32(name.encode()))))
    return (rng.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))).astype(np.float32)
