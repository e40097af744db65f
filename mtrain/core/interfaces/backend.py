"""A way of training on many ranks."""

from abc import abstractmethod
from types import ModuleType
from typing import ClassVar, Protocol

from mtrain.core.interfaces.options import FromOptions
from mtrain.core.interfaces.recipe import Recipe
from mtrain.core.interfaces.session import RankSession

NEUTRAL_FRAMEWORKS = ("torch", "paddle")
"""Frameworks on which mtrain's layers and functions exist."""


class Backend(FromOptions, Protocol):
    """A way of training on many ranks: the target of one ``mtrain.backends`` entry point.

    It is constructed as ``Backend(options)``. Its module must not import a framework before ``nn``, ``ops`` or ``with``
    is used. All members are valid at any time; those that need the other ranks are in the ``RankSession`` that
    ``with backend as session:`` binds.

    A class that has all members need not be derived from this one. A class that is derived from it inherits the members
    that are not abstract: ``check``, ``before_script``, ``takes_meshes``, ``waits_asleep`` and
    ``gives_up_s``.
    """

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

    @abstractmethod
    def __enter__(self) -> RankSession:
        """Join the other ranks and return this rank's session. Every rank must call."""
        ...

    @abstractmethod
    def __exit__(self, *error: object) -> None:
        """Leave the other ranks, without waiting for them after an error, and release what the session holds."""
        ...
