"""Backend ``fleet``: many ranks with ``paddle.distributed.fleet``, over gloo on the CPU and NCCL on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from mtrain.backends import paddle_limits
from mtrain.backends.base import DeviceOptions, EngineBackend
from mtrain.core.interfaces import RankSession, Recipe
from mtrain.core.overriding import override

if TYPE_CHECKING:
    from mtrain.backends._paddle.job import FleetJob


class Fleet(EngineBackend):
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

    framework = "paddle"
    rendezvous = "paddle"
    gives_up_s = 30.0

    def __init__(self, options: Options) -> None:
        self.options = options
        self._job: FleetJob | None = None

    @override
    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        paddle_limits.check(recipe, on_cpu=on_cpu)

    @override
    def __enter__(self) -> RankSession:
        place = self.part("rank_environment").of_this_rank()
        target = self.part("device").choose(
            self.options.device, local_rank=place.local_rank, tf32=self.options.tf32, keep=self.options.keep_memory
        )
        if place.size == 1:
            engine = self.part("engine").of_one_rank(target, check=self.check)
        else:
            self._job = self.part("job").FleetJob(place, target, self.options)
            engine = self.part("fleet_engine").FleetEngine(self._job, target, check=self.check)
        engine.late_figures = self.options.late_figures
        session: RankSession = engine
        return session

    @override
    def __exit__(self, *error: object) -> None:
        if self._job is not None:
            self._job.leave(error[1] if error else None)
        self._job = None
