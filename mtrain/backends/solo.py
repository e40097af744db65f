"""Backend ``solo``: a single rank on torch or Paddle, without exchange of gradients."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from mtrain.backends import paddle_limits
from mtrain.backends.base import DeviceOptions, EngineBackend
from mtrain.core.interfaces import Recipe


class Solo(EngineBackend[Any]):
    """``core.interfaces.Backend`` for one process on one device."""

    class Options(DeviceOptions):
        """Options of backend ``solo``."""

        framework: Literal["torch", "paddle"] = Field(
            "torch", description="whose layers and functions the model is built on"
        )

    rendezvous: ClassVar[str] = "none"

    def __init__(self, options: Options) -> None:
        self.options = options
        self.framework = options.framework

    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        """See ``Backend.prepare``."""
        if self.framework == "paddle":
            paddle_limits.check(recipe, on_cpu=on_cpu)

    def __enter__(self) -> Self:
        target = self.part("device").choose(
            self.options.device, local_rank=0, tf32=self.options.tf32, keep=self.options.keep_memory
        )
        self._entered = self.part("engine").of_one_rank(target)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = None
