"""What brings a job to several hosts."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from mtrain.core.interfaces.options import FromOptions

if TYPE_CHECKING:
    from mtrain.core.interfaces.queue import Queue


def _ignore(text: str) -> None:
    """Do nothing: a plan shows no notes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedJob:
    """The facts about a job from which a cluster brings it to its hosts."""

    hosts: Sequence[str]
    """Addresses of the hosts, as the spec lists them; the first has rank 0."""
    agent: Sequence[str]
    """The command line that starts an agent on a host; it talks to its leader over its standard input and output."""
    line: Sequence[str] = ()
    """The mtrain command that was typed here, word by word."""
    cluster: str = ""
    """The name under which the spec chooses the cluster."""
    failure_timeout_s: int = 60
    """Seconds of silence that end a job, and within which every host must have joined."""
    note: Callable[[str], None] = field(default=_ignore, compare=False)
    """Shows the user a line; in a plan it does nothing."""


class Cluster(FromOptions, Protocol):
    """A plugin that brings a job to several hosts: over ssh, through a scheduler, or by printing what people type.

    It is the target of one ``mtrain.clusters`` entry point, constructed as ``Cluster(options)``. It works with any
    ``Launcher``, which starts the ranks of each host.
    """

    starts: ClassVar[bool] = True
    """True: the mtrain command that the user types leads the job and connects to the hosts through ``gathering``.
    False: it prints ``command`` for each host and ends."""
    assigns: ClassVar[frozenset[str]] = frozenset()
    """Environment variables by which it assigns devices on each host; those of the leader are not sent there."""
    submits: ClassVar[str] = ""
    """For a cluster without a queue here: the command that submits an mtrain command to its scheduler."""

    @property
    def python(self) -> str | None:
        """Return the path of the hosts' interpreter that has mtrain; None: the path of the one that runs mtrain here."""
        return None

    def places(self, count: int) -> Sequence[str]:
        """Return names for ``count`` hosts that the cluster itself chooses when the job starts.

        A job that names no host then gets ``cluster.nodes`` such hosts. Its plan shows these names; the members of the
        gathering bring the addresses. Empty: the user, or an allocation, names the hosts.
        """
        return ()

    @abstractmethod
    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Return the command that brings the job to host number ``node``; ``mtrain plan`` prints it.

        With ``starts`` it is run here, reaches the host and runs ``job.agent`` there. Otherwise it is the line to type
        on the host.

        Raises:
            UsageError: the host cannot be reached in this way.
        """
        ...

    def gathering(self, job: HostedJob, environ: Mapping[str, str]) -> Any:
        """Return a ``mtrain.jobs.hosts.hosts.Gathering``, through which the leader connects to the agents of the hosts.

        ``mtrain.jobs.hosts.agent_processes.AgentProcesses`` runs ``command`` for each host and talks to the agent over the
        command's standard input and output. A cluster whose agents are already there, or whose scheduler starts them,
        returns its own gathering. It is called with ``starts`` only; import ``mtrain.jobs`` in here, because a plan
        needs nothing of it.

        ``environ``: environment of the processes to start.
        """
        return None

    def queue(self) -> "Queue | None":
        """Return the queue to which ``mtrain submit`` gives jobs; None: this cluster has none."""
        return None
