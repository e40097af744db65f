"""Recognise a job of PBS Professional, OpenPBS or Torque."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import evidence
from mtrain.spec.files import read_text

MAX_NODEFILE_BYTES = 1 << 24
"""Largest file of hosts that is read."""


class Pbs(AllocationReader):
    """The command runs on the first of the hosts only.

    The file ``PBS_NODEFILE`` names the host of each slot or MPI process, one a line, so that a host can occur often.
    """

    Options = NoOptions
    distance: ClassVar[int] = 32

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the hosts, if there are several and their file can be read."""
        file = environ.get("PBS_NODEFILE", "")
        if "PBS_JOBID" not in environ or not file:
            return None
        try:
            lines = read_text(Path(file), limit=MAX_NODEFILE_BYTES).splitlines()
        except (OSError, ValueError):  # A shell that left its job may still have the variables, but not the file.
            return None
        hosts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
        if len(hosts) < 2:
            return None
        return Allocation(
            scheduler="PBS",
            evidence=evidence(environ, "PBS_JOBID", "PBS_NODEFILE"),
            hosts=len(hosts),
            host_names=hosts,
            processes=1,
            one_each="pbsdsh -u mtrain ...",
        )

    def job_id(self, environ: Mapping[str, str]) -> str | None:
        """Return the id of the job without the server's name. It holds the place in an array: ``1234[5].server``."""
        return environ.get("PBS_JOBID", "").partition(".")[0] or None
