"""One rank, no exchange."""

from typing import ClassVar, Literal, Self

from pydantic import Field

from mtrain.backends._torch.backend import TorchBackend, TorchOptions


class Solo(TorchBackend):
    """``core.interfaces.Backend`` for one process on one device."""

    class Options(TorchOptions):
        """Options of backend ``solo``."""

        framework: Literal["torch"] = Field("torch", description="whose layers and functions the model is built on")

    rendezvous: ClassVar[str] = "none"

    def __init__(self, options: Options) -> None:
        self.options = options

    def __enter__(self) -> Self:
        from mtrain.backends._torch import device
        from mtrain.backends._torch.collective import LocalCollective
        from mtrain.backends._torch.engine import TorchEngine

        target = device.choose(self.options.device, local_rank=0, tf32=self.options.tf32, keep=self.options.keep_memory)
        self._entered = TorchEngine(LocalCollective(), target)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = None
