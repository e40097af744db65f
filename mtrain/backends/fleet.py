"""Backend ``fleet``: many ranks with ``paddle.distributed.fleet``, over gloo on the CPU and NCCL on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, field_validator

from mtrain.backends import paddle_limits
from mtrain.backends.base import DeviceOptions, EngineBackend
from mtrain.core.interfaces import Module, Optimizer, Recipe

if TYPE_CHECKING:
    from mtrain.backends._paddle.engine import PaddleEngine  # noqa: F401 - named in a string below
    from mtrain.backends._paddle.job import FleetJob


class Fleet(EngineBackend["PaddleEngine"]):
    """``core.interfaces.Backend`` over Paddle Fleet; started by ``paddle.distributed.launch`` or with its variables."""

    class Options(DeviceOptions):
        """Options of backend ``fleet``."""

        timeout_s: float = Field(
            600.0,
            gt=0,
            description="a rank that waits longer for another one ends the job; on CPU gloo itself gives up after 30 s "
            "within one forward and backward pass",
        )
        bucket_mb: int = Field(25, gt=0, description="gradients are exchanged in buckets of this size")
        last_bucket_mb: float = Field(1.0, gt=0, description="size of the bucket that is exchanged last")
        fuse: bool = Field(
            default=True, description="false: every gradient is exchanged alone, in place of bucket sizes"
        )
        find_unused_parameters: bool = Field(
            default=False, description="for models that leave out parameters in some updates"
        )
        sharding_stage: int = Field(
            0,
            ge=0,
            le=3,
            description="0: every rank holds all moments; 1 to 3 are refused, on any device: see the error",
        )

        @field_validator("sharding_stage")
        @classmethod
        def _moments_are_whole(cls, stage: int) -> int:
            if stage:
                raise ValueError(
                    f"stage {stage} cuts up the moments of a paddle.optimizer; those of mtrain's rules are mtrain's own, so that all "
                    "backends learn alike (and Paddle's stages 2 and 3 take no CPU); use 0, or a backend that shards"
                )
            return stage

    framework = "paddle"
    rendezvous: ClassVar[str] = "paddle"

    def __init__(self, options: Options) -> None:
        self.options = options
        self._job: FleetJob | None = None

    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        """See ``Backend.prepare``."""
        paddle_limits.check(recipe, on_cpu=on_cpu)

    def __enter__(self) -> Self:
        place = self.part("rank_environment").of_this_rank()
        target = self.part("device").choose(
            self.options.device, local_rank=place.local_rank, tf32=self.options.tf32, keep=self.options.keep_memory
        )
        if place.size == 1:
            self._entered = self.part("engine").of_one_rank(target)
            return self
        self._job = self.part("job").FleetJob(place, target, self.options)
        self._entered = self.part("engine").PaddleEngine(self._job.collective, target)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = None
        if self._job is not None:
            self._job.leave(error[1] if error else None)
        self._job = None

    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        """See ``Backend.prepare``."""
        if self._job is None:
            return self.engine.prepare(build, recipe)
        return self.engine.prepare(build, recipe, partial(self._job.wrap, waits=self.engine.waits))
