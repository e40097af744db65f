"""Recognise a job of IBM Spectrum LSF."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import evidence


class Lsf(AllocationReader):
    """The command runs on the first of the hosts only.

    ``LSB_MCPU_HOSTS`` lists hosts and their slots in turn: "hostA 4 hostB 4".
    """

    Options = NoOptions
    distance: ClassVar[int] = 31

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the hosts, if there are several."""
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        hosts = words[::2]
        if "LSB_JOBID" not in environ or len(hosts) < 2 or len(words) % 2:
            return None
        return Allocation(
            scheduler="LSF",
            evidence=evidence(environ, "LSB_JOBID", "LSB_MCPU_HOSTS"),
            hosts=len(hosts),
            host_names=hosts,
            processes=1,
            one_each="blaunch -z HOSTS mtrain ...",
        )

    def job_id(self, environ: Mapping[str, str]) -> str | None:
        """Return the number of the job and, in an array, the place in it."""
        job, place = environ.get("LSB_JOBID"), environ.get("LSB_JOBINDEX", "0")
        return job and (job if place in ("", "0") else f"{job}_{place}")  # 0: the job is no array
