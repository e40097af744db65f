"""A way of training on many ranks."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import ClassVar, Protocol

from pydantic import BaseModel

from mtrain.core.interfaces.recipe import Recipe
from mtrain.core.interfaces.session import RankSession

NEUTRAL_FRAMEWORKS = ("torch", "paddle")
"""Frameworks on which mtrain's layers and functions exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedArray:
    """A weight of a model that is not built yet."""

    shape: tuple[int, ...]
    trained: bool = True

    @property
    def length(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Backend(Protocol):
    """A way of training on many ranks: the target of one ``mtrain.backends`` entry point.

    It is constructed as ``Backend(options)``. Its module must not import a framework before ``nn``, ``ops`` or ``with``
    is used. All members are valid at any time; those that need the other ranks are in the ``RankSession`` that
    ``with backend as session:`` binds.

    A class that has all members need not be derived from this one. A class that is derived from it inherits the members
    that are not abstract: ``check``, ``before_script``, ``takes_meshes``, ``waits_asleep``,
    ``gives_up_s`` and ``sent_per_update``.
    """

    Options: ClassVar[type[BaseModel]]
    framework: str
    """The framework whose ``nn`` and ``ops`` this backend uses: "torch" or "paddle". On any other one, such as "tensorflow", it
    has neither and starts scripts alone, which join the ranks themselves."""
    rendezvous: str
    """Name of the way in which its ranks find each other, one of those that its launcher ``provides``; "none": it has one
    rank."""

    takes_meshes: ClassVar[bool] = False
    """Whether its ranks can be laid out by ``Recipe.mesh``; a recipe with one is refused elsewhere."""
    waits_asleep: ClassVar[bool] = True
    """Whether a rank on a CPU takes no processor time while it waits for others. False: it polls, so waiting looks like work."""
    gives_up_s: ClassVar[float | None] = None
    """After how many seconds an exchange ends the job whatever its options say; None: none does."""

    @property
    @abstractmethod
    def nn(self) -> ModuleType:
        """The framework's neutral layers (``core/nn.pyi``)."""
        ...

    @property
    @abstractmethod
    def ops(self) -> ModuleType:
        """The framework's neutral functions (``core/ops.pyi``)."""
        ...

    def check(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        """Refuse a recipe that this backend cannot follow. The default refuses nothing.

        The plan calls it, so that the job is refused before a rank starts; it must not import a framework.
        ``RankSession.prepare`` refuses the same recipes, because only a rank knows its device for certain.

        Args:
            recipe: The recipe of the job.
            size: Number of ranks.
            on_cpu: Whether it is certain that they compute on the CPU.

        Raises:
            SpecError: The backend cannot follow the recipe; the message names the key of the spec.
        """
        return

    def before_script(self) -> None:
        """Prepare the process in which a user's script is about to run. The default does nothing.

        The script may never open a session, so it must not import a framework.
        """
        return

    def sent_per_update(
        self, arrays: Sequence[PlannedArray], recipe: Recipe, *, size: int, on_cpu: bool
    ) -> float | None:
        """Return how many bytes each of ``size`` ranks sends in an update, for the plan; None, the default: not known.

        It must not import a framework. Left out is what does not grow with the model: what ranks agree on after an update.

        Args:
            arrays: The weights of the model in its order, without buffers.
            recipe: The recipe of the job, without a mesh.
            size: Number of ranks.
            on_cpu: Whether it is certain that they compute on the CPU.
        """
        return None

    @abstractmethod
    def __enter__(self) -> RankSession:
        """Join the other ranks and return this rank's session. Every rank must call."""
        ...

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """Leave the other ranks, without waiting for them after an error, and release what the session holds."""
        ...
