"""What starts the ranks of one host."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from mtrain.core.interfaces.options import FromOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One process to start on one host: data that is printed by ``mtrain plan`` and run by ``mtrain train``."""

    host: str
    argv: Sequence[str]
    env: Mapping[str, str]
    """Variables set for the process, in addition to the cleaned environment of the caller."""
    stdin: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine of a job."""

    address: str
    slots: int = 1
    """Number of ranks on this host."""


class Launcher(FromOptions, Protocol):
    """A plugin that turns a job into the commands that start its ranks. It runs nothing itself.

    ``mtrain plan`` prints the commands, ``mtrain train`` runs them. It is the target of one ``mtrain.launchers`` entry
    point, constructed as ``Launcher(options)``.
    """

    provides: frozenset[str] = frozenset()
    """The kinds of rendezvous that it provides: see ``Backend.rendezvous``."""
    automatic: ClassVar[bool] = True
    """False: of several launchers that provide the rendezvous of a backend, this one is chosen last."""
    agent: ClassVar[bool] = True
    """True: its command is a process that starts the ranks as its children. False: its command is itself the rank."""
    takes_names: ClassVar[bool] = True
    """False: on several hosts ``plan`` receives an address of each host in place of a name, the same in every command,
    as soon as the leader of the job knows it."""

    forwards_signals: ClassVar[bool] = False
    """True: its command passes each SIGINT and SIGTERM on to its ranks, and lets them end by themselves for a while."""

    @abstractmethod
    def plan(self, argv: Sequence[str], hosts: Sequence[Host], ranks_per_host: int) -> Sequence[Command]:
        """Return the command of each host.

        ``argv`` is the command line of one rank without the interpreter (``-m mtrain.rank.worker ...``).
        """
        ...

    @abstractmethod
    def deaths(self, log: str, status: int) -> Sequence[tuple[int, int]]:
        """Return (rank, exit status; negative: signal) of each rank that failed.

        They are read from the output ``log`` and the exit status ``status`` of the launcher's command.
        """
        ...

    def own_logs(self, command: Command) -> str | None:
        """Return the folder of files that the launcher itself writes while ranks run, which may become long; None: there is none."""
        return None
