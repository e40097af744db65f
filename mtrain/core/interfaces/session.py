"""One rank of a running job, as a backend supplies it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mtrain.core.interfaces.capabilities import Capabilities
from mtrain.core.interfaces.collective import Collective
from mtrain.core.interfaces.optimizer import Optimizer
from mtrain.core.interfaces.recipe import Recipe
from mtrain.core.interfaces.state import State
from mtrain.core.interfaces.tensors import Array, Batch, HostBatch, Module, Tensor

Narrow = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Type of ``Model.narrowed``. A session whose device is the CPU need not take it."""


class RankSession(Protocol):
    """One rank of a running job: what ``with backend as session:`` binds. Nothing of it may be used afterwards.

    A class that has all members need not be derived from this one. ``capabilities`` alone has a default, which is
    inherited, and given to a session of another class that lacks it.
    """

    if TYPE_CHECKING:  # at run time these are plain attributes, so that derived classes can assign them

        @property
        def collective(self) -> Collective:
            """Communication among the ranks of the job."""
            ...

        @property
        def device(self) -> str:
            """This rank's device, for display: ``cpu``, or ``cuda:1 (NVIDIA H100)``."""
            ...

        @property
        def capabilities(self) -> Capabilities:
            """What this session can do beyond what every session must. The default: nothing."""
            return Capabilities()

    else:
        collective: Collective
        device: str
        capabilities: Capabilities = Capabilities()

    @abstractmethod
    def prepare(self, build: Callable[[], Module], recipe: Recipe) -> tuple[Module, Optimizer]:
        """Build the model, place it on this rank's device and bind the recipe to it. Every rank must call.

        Raises:
            SpecError: ``Backend.check`` refuses the recipe, or it cannot be followed on this rank's device.
        """
        ...

    @abstractmethod
    def batches(self, loader: Iterable[HostBatch]) -> Iterator[Batch]:
        """Yield the micro batches of ``loader`` as device tensors, prefetched where the device allows."""
        ...

    @abstractmethod
    def infer(self, model: Module, batch: Batch, *, narrow: Narrow | None = None) -> dict[str, Array]:
        """Run the model on one batch and return its outputs, changed by ``narrow`` on the device, as numpy arrays.

        Nothing is exchanged between ranks and no gradient is kept. The pass has the recipe's precision; half-precision
        results become float32. The caller must have put the model into evaluation mode.
        """
        ...

    @abstractmethod
    def state(self, model: Module, optimizer: Any) -> State:
        """Return copies of weights and optimizer state as whole arrays under neutral names. Every rank must call.

        ``model`` and ``optimizer`` are those that ``prepare`` returned. Every rank gets the whole state and may drop
        it.
        """
        ...

    @abstractmethod
    def restore(self, model: Module, optimizer: Any, state: State) -> None:
        """Load ``state`` into model and optimizer, as ``prepare`` returned them. Every rank must call.

        A part of ``state`` that is empty leaves the current values, except that an empty ``ema`` restarts the average
        from the weights.
        """
        ...

    @abstractmethod
    def measure(self) -> Mapping[str, float]:
        """Return measurements of this rank.

        ``memory_bytes`` is its peak on its device (resident set size on a CPU), ``device_free_bytes`` what it could have
        of a GPU. ``communication_s`` is there after ``Capabilities.time_waits``, where waiting can be measured: the total
        time in seconds in which this rank has done nothing but wait for other ranks.
        """
        ...
