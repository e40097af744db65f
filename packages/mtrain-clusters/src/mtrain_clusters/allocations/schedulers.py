"""Recognise schedulers that tell little: on which hosts the command may run, or which of the hosts this is."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader
from mtrain.launchers.allocations.variables import Starter, evidence, number, pods
from mtrain.spec.files import read_text

MAX_NODEFILE_BYTES = 1 << 24
"""Largest file of hosts that is read."""


class Lsf(AllocationReader):
    """A job of IBM Spectrum LSF: the command runs on the first of the hosts only.

    ``LSB_MCPU_HOSTS`` lists hosts and their slots in turn: "hostA 4 hostB 4".
    """

    distance: ClassVar[int] = 31

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the hosts, if there are several."""
        words = environ.get("LSB_MCPU_HOSTS", "").split()
        if "LSB_JOBID" not in environ or len(words) % 2:
            return None
        shown = evidence(environ, "LSB_JOBID", "LSB_MCPU_HOSTS")
        return _on_the_first("LSF", words[::2], shown, one_each="blaunch -z HOSTS mtrain ...")

    def job_id(self, environ: Mapping[str, str]) -> str | None:
        """Return the number of the job and, in an array, the place in it."""
        job, place = environ.get("LSB_JOBID"), environ.get("LSB_JOBINDEX", "0")
        return job and (job if place in ("", "0") else f"{job}_{place}")  # 0: the job is no array


class Pbs(AllocationReader):
    """A job of PBS Professional, OpenPBS or Torque: the command runs on the first of the hosts only.

    The file ``PBS_NODEFILE`` names the host of each slot or MPI process, one a line, so that a host can occur often.
    """

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
        return _on_the_first(
            "PBS", hosts, evidence(environ, "PBS_JOBID", "PBS_NODEFILE"), one_each="pbsdsh -u mtrain ..."
        )

    def job_id(self, environ: Mapping[str, str]) -> str | None:
        """Return the id of the job without the server's name. It holds the place in an array: ``1234[5].server``."""
        return environ.get("PBS_JOBID", "").partition(".")[0] or None


class Pmi(Starter):
    """Processes of ``mpiexec`` of MPICH and of Intel MPI, which the process manager interface (PMI) tells their number."""

    distance: ClassVar[int] = 21
    scheduler, size, rank, local = "MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"
    one_each = "mpiexec -ppn 1 mtrain ..."

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the processes of all hosts; None also where srun itself has set the variables (``--mpi=pmi2``)."""
        task, tasks = number(environ, "SLURM_PROCID"), number(environ, "SLURM_STEP_NUM_TASKS")
        if task is not None and (task, tasks) == (number(environ, self.rank), number(environ, self.size)):
            return None
        return super().read(environ)


class Jsrun(Starter):
    """Processes of ``jsrun``, IBM's starter of processes on the hosts of a job of LSF."""

    distance: ClassVar[int] = 22
    scheduler, size, rank = "jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"
    local = "JSM_NAMESPACE_LOCAL_SIZE"
    one_each = "jsrun --tasks_per_rs 1 --rs_per_host 1 mtrain ..."


class IndexedJob(AllocationReader):
    """An indexed Job of Kubernetes: its pods know their own index but not how many there are, nor the others' names."""

    distance: ClassVar[int] = 60

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the place of this pod."""
        place = number(environ, "JOB_COMPLETION_INDEX")
        shown, scheduler = evidence(environ, "JOB_COMPLETION_INDEX"), "Kubernetes, as an indexed Job,"
        if place is None or pods(environ) == 1:  # The only pod of a TrainJob is one of an indexed Job, too.
            return None
        return Allocation(scheduler=scheduler, evidence=shown, processes_per_host=1, process=place, place=place)


def _on_the_first(scheduler: str, hosts: list[str], shown: str, *, one_each: str) -> Allocation | None:
    """Return an allocation of several hosts whose command runs on the first one."""
    if len(hosts) < 2:
        return None
    return Allocation(
        scheduler=scheduler, evidence=shown, hosts=len(hosts), host_names=hosts, processes=1, one_each=one_each
    )
