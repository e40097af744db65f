"""Backend ``solo``: a single rank on torch or Paddle, without exchange of gradients."""

from typing import Literal

from pydantic import Field

from mtrain.backends import paddle_limits
from mtrain.backends.base import DeviceOptions, EngineBackend
from mtrain.core.interfaces import RankSession, Recipe
from mtrain.core.overriding import override


class Solo(EngineBackend):
    """``core.interfaces.Backend`` for one process on one device."""

    class Options(DeviceOptions):
        """Options of backend ``solo``."""

        framework: Literal["torch", "paddle"] = Field(
            "torch", description="whose layers and functions the model is built on"
        )

    rendezvous = "none"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.framework = options.framework

    @override
    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        if self.framework == "paddle":
            paddle_limits.check(recipe, on_cpu=on_cpu)

    @override
    def __enter__(self) -> RankSession:
        target = self.part("device").choose(
            self.options.device, local_rank=0, tf32=self.options.tf32, keep=self.options.keep_memory
        )
        engine = self.part("engine").of_one_rank(target, check=self.check)
        engine.late_figures = self.options.late_figures
        session: RankSession = engine
        return session

    @override
    def __exit__(self, *error: object) -> None:
        """Do nothing: a single rank is connected to nobody."""
