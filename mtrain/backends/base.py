"""Base classes of backends on any framework: options of a rank's device, and forwarding of calls to an engine.

Importing this module imports no framework.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Array, Batch, Collective, HostBatch, Module, Optimizer, Recipe, State
from mtrain.errors import LaunchError
from mtrain.spec import remedies

EXTRAS = {"torch": "ddp", "paddle": "fleet-cpu"}
"""Maps a framework to the extra of mtrain that installs it."""


class DeviceOptions(BaseModel):
    """Options that every backend has: those of a rank's device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is any")
    tf32: bool = Field(default=True, description="CUDA: fp32 convolutions and products in TensorFloat-32")
    keep_memory: bool = Field(default=True, description="CPU: memory of an update is kept for the next one (glibc)")


class Engine(Protocol):
    """One rank of a job on one framework: ``core.interfaces.Backend`` without joining and leaving the ranks."""

    device: Any
    """The framework's own object for the device."""

    @property
    def collective(self) -> Collective: ...  # noqa: D102 - as in Backend, like all below

    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]: ...  # noqa: D102

    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]: ...  # noqa: D102

    def infer(self, model: Module, batch: Batch) -> dict[str, Array]: ...  # noqa: D102

    def state(self, model: Module, optimizer: Any) -> State: ...  # noqa: D102

    def restore(self, model: Module, optimizer: Any, saved: State) -> None: ...  # noqa: D102

    def measure(self) -> Mapping[str, float]: ...  # noqa: D102

    def time_waits(self) -> None: ...  # noqa: D102


E = TypeVar("E", bound=Engine)


class EngineBackend(Generic[E]):
    """A backend that forwards calls to the engine that its subclass makes in ``__enter__``."""

    framework: str
    _entered: E | None = None

    def part(self, name: str) -> ModuleType:
        """Import module ``name`` from the folder of this backend's framework (``_torch`` or ``_paddle``).

        Raises:
            LaunchError: The framework is not installed.
        """
        if find_spec(self.framework) is None:
            raise LaunchError(
                f"{type(self).__name__.lower()} on {self.framework} was asked for, but {self.framework} is not installed "
                f"here; install it with: {remedies.install(EXTRAS[self.framework])}"
            )
        return import_module(f"mtrain.backends._{self.framework}.{name}")

    @property
    def nn(self) -> ModuleType:
        """The neutral layers on this framework."""
        return self.part("nn")

    @property
    def ops(self) -> ModuleType:
        """The neutral functions on this framework."""
        return self.part("ops")

    @property
    def engine(self) -> E:
        """The engine of this rank; valid inside ``with backend:`` only."""
        assert self._entered is not None, "use the backend inside `with backend:`"
        return self._entered

    @property
    def device(self) -> str:
        """See ``Backend.device``."""
        named: str = self.part("device").named(self.engine.device)
        return named

    @property
    def collective(self) -> Collective:
        """The ranks of this job."""
        return self.engine.collective

    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        """Refuse nothing; subclasses override this, see ``Backend.prepare``."""

    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        """See ``Backend.prepare``."""
        self.check(recipe, size=self.collective.size, on_cpu=self.device == "cpu")
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

    def time_waits(self) -> None:
        """See ``Backend.measure``."""
        self.engine.time_waits()
