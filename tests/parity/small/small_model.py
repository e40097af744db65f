"""A classifier as a local plugin: small enough that a job is the start of its ranks and little else."""

import zlib
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from mtrain.core.interfaces import Array, Collective, HostBatch, Model, Module, Task


class Small(Model):
    """``Model`` of ``core.interfaces``."""

    class Options(BaseModel):
        """None."""

    kind: ClassVar[str] = "classification"

    def __init__(self, options: BaseModel) -> None:
        del options

    def prepare_task(self, task: Task, statistics: Mapping[str, object]) -> Task:
        """As it is."""
        return task

    def build(self, task: Task, collective: Collective) -> Module:
        """The network, on the bound framework."""
        from small_network import Network

        return Network(len(task.class_names))

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Normal weights, BatchNorm at rest."""
        return {name: start_value(name, shape, seed) for name, shape in shapes.items()}

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Array]:
        """Per image float32 (C,): the probability of each class."""
        return [np.asarray(row_C, np.float32) for row_C in output["probabilities"]]


def start_value(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Keyed by (seed, name)."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    if name.endswith(("bias", "running_mean")):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.random.default_rng((seed, zlib.crc32(name.encode()))).normal(0, 0.3, shape).astype(np.float32)
