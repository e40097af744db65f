"""The part of ``core.interfaces.Backend`` that all backends on torch share. Imports torch only when asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Array, Batch, Collective, HostBatch, Module, Optimizer, Recipe, State

if TYPE_CHECKING:
    from mtrain.backends._torch.engine import TorchEngine


class TorchOptions(BaseModel):
    """Options of every backend on torch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is any")
    tf32: bool = Field(default=True, description="CUDA: fp32 convolutions and products in TensorFloat-32")
    keep_memory: bool = Field(default=True, description="CPU: memory of an update is kept for the next one (glibc)")


class TorchBackend:
    """Passes calls on to the engine that a subclass makes in ``__enter__``."""

    framework: ClassVar[str] = "torch"
    _entered: TorchEngine | None = None

    @property
    def nn(self) -> ModuleType:
        """The neutral layers."""
        from mtrain.backends._torch import nn

        return nn

    @property
    def ops(self) -> ModuleType:
        """The neutral functions."""
        from mtrain.backends._torch import ops

        return ops

    @property
    def engine(self) -> TorchEngine:
        """Valid inside ``with backend:``."""
        assert self._entered is not None, "use the backend inside `with backend:`"
        return self._entered

    @property
    def collective(self) -> Collective:
        """The ranks of this job."""
        return self.engine.collective

    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        """See ``Backend.prepare``."""
        return self.engine.prepare(build, recipe)

    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        """See ``Backend.batches``."""
        return self.engine.batches(loader)

    def infer(self, model: Module, batch: Batch) -> dict[str, Array]:
        """See ``Backend.infer``."""
        return self.engine.infer(model, batch)

    def state(self, model: Module, optimizer: Any) -> State:
        """See ``Backend.state``."""
        return self.engine.state(model, optimizer)

    def restore(self, model: Module, optimizer: Any, state: State) -> None:
        """See ``Backend.restore``."""
        self.engine.restore(model, optimizer, state)

    def measure(self) -> Mapping[str, float]:
        """See ``Backend.measure``."""
        return self.engine.measure()
