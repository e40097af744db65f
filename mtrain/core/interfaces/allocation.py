"""The interface between mtrain and the plugins that recognise the allocation of a scheduler.

An allocation is what a scheduler, or a starter of processes, has reserved for the command that runs here.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from pydantic import BaseModel

from mtrain.spec.section import NoOptions as NoOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The processes or hosts that a scheduler, or a starter of processes, has reserved for the command that runs here.

    A value that the environment does not tell is None or empty. mtrain takes the hosts from an allocation that names
    them if either ``cluster`` is set, or one process on each host runs the command and knows its ``place``.
    """

    scheduler: str
    """Name in messages, such as "Slurm"."""
    evidence: str
    """The variables that show the allocation, with their values: ``SLURM_JOB_ID=1, SLURM_JOB_NUM_NODES=2``."""
    hosts: int | None = None
    """Number of hosts."""
    host_names: Sequence[str] = ()
    """Names of the hosts in their order, as the variables tell them; the first will have rank 0."""
    expand: Sequence[str] = ()
    """A command whose output lists the names, one a line. It is run only when the names are used, and counts more than
    ``host_names``, which are taken where it cannot be run."""
    processes: int | None = None
    """How many times the scheduler starts this command on all hosts together."""
    process: int | None = None
    """Index of this process among them, from 0."""
    processes_per_host: int | None = None
    """How many of them run on each host; None also where hosts have different numbers."""
    place: int | None = None
    """Index of this host in the order of the hosts, from 0."""
    ranks_per_host: int | None = None
    """Number of ranks on each host that the user has asked the scheduler for."""
    cluster: str = ""
    """Name of the cluster plugin that brings a job from here to the hosts, if the command runs once, on one of them.
    Empty: the hosts meet as if the command was typed on each."""
    port: int | None = None
    """Port of the first host where its hosts can meet, the same on all."""
    interface: str = ""
    """Network interface that connects the hosts."""
    one_each: str = ""
    """The command that starts one process on each host, for messages; empty: there is none that a user could type."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field -> the variables that tell it, where that is not ``evidence``."""

    @property
    def copies(self) -> bool:
        """Return whether the scheduler starts this command more than once."""
        return self.processes is None or self.processes > 1

    def source(self, name: str) -> str:
        """Return the variables that tell the field ``name``."""
        return self.sources.get(name) or self.evidence


MAX_HOSTS = 1024
"""Largest number of hosts of a job. Readers name no hosts of an allocation that has more."""
MAX_HOST_NAME = 253
"""Characters of the longest name of a host (RFC 1035, section 2.3.4). Readers name no hosts with longer names."""


class AllocationReader(Protocol):
    """A plugin that recognises one scheduler, or one starter of processes, by the environment that it gives a process.

    It is the target of one ``mtrain.allocations`` entry point, constructed as ``AllocationReader(options)``. It reads
    the variables that its program documents, and files that they name; it runs no command.
    """

    Options: ClassVar[type[BaseModel]] = NoOptions
    distance: ClassVar[int]
    """How far from this process the program is that it recognises: 10 to 19 for a starter of ranks, such as torchrun; 20
    to 29 for a starter of processes on several hosts, such as mpirun; 30 to 39 for a scheduler of hosts, such as Slurm;
    40 and more for containers. If several programs have set their variables, the one with the lowest number counts,
    because Slurm may start mpirun, and mpirun torchrun."""

    def __init__(self, options: BaseModel) -> None:
        """Take the validated options."""

    @abstractmethod
    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the allocation that the variables ``environ`` show; None: not this program's, or one process alone."""
        ...

    def job_id(self, environ: Mapping[str, str]) -> str | None:
        """Return the scheduler's id of this job, with its place in an array of jobs; None: it has none.

        A job that is put back into its queue keeps its id, so that runs can be named after it.
        """
        return None
