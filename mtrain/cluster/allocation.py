"""Recognise the scheduler or process starter (Slurm, MPI, torchrun ...) in whose allocation this process runs.

Everything is read from environment variables that these programs document; none of their commands is called.
``recognised`` is a pure function of an environment, so that it can be tested with recorded environments.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Environ = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """An allocation of several processes or hosts by a scheduler."""

    scheduler: str
    """Name of the scheduler in messages."""
    evidence: str
    """The variables that show it, with their values."""
    hosts: int | None
    """Number of hosts; None: unknown."""
    processes: int | None
    """How many processes the scheduler starts with this command; None: unknown."""
    place: int | None = None
    """Index of this process among them, from 0; None: unknown."""
    one_each: str = ""
    """The command that starts one process on each host; empty: there is none that a user could type."""
    names: str = ""
    """Shell text that expands to the names of the hosts, separated by commas; empty: there is none."""

    @property
    def copies(self) -> bool:
        """Return whether the scheduler starts this command more than once."""
        return self.processes is None or self.processes > 1


def recognised(environ: Environ) -> Allocation | None:
    """Return the allocation of several processes or hosts that this process belongs to, or None.

    Where several programs have set their variables, the one that is closest to this process wins, see ``_RECOGNISERS``.
    """
    return next((allocation for recognise in _RECOGNISERS if (allocation := recognise(environ)) is not None), None)


def job_id(environ: Environ) -> str | None:
    """Return the scheduler's id of this job, with its place in an array of jobs; None outside of a scheduler.

    A job that the scheduler puts back into its queue keeps its id.
    """
    for job, array in (
        ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
        ("SLURM_JOB_ID", ""),
        ("LSB_JOBID", "LSB_JOBINDEX"),
        ("PBS_JOBID", ""),  # holds the place in the array, 1234[5].host
    ):
        if number := environ.get(job):
            place = environ.get(array, "")
            if array == "LSB_JOBINDEX" and place == "0":
                place = ""  # LSF's index of a job that is no array
            words = number.partition(".")[0] + (f"_{place}" if place else "")
            return "".join(letter if letter.isalnum() or letter in "_-" else "_" for letter in words)
    return None


def contradiction(allocation: Allocation) -> str:
    """Return the message that says why a job of one host is not started in ``allocation``, and what to type instead."""
    if allocation.copies:
        place = "" if allocation.place is None else f"number {allocation.place} "
        count = "several" if allocation.processes is None else str(allocation.processes)
        problem = f"this is process {place}of {count} that {allocation.scheduler} starts ({allocation.evidence})"
        result = "each of them would train a job of its own"
    else:
        problem = f"{allocation.scheduler} has given this job {allocation.hosts} hosts ({allocation.evidence})"
        result = "it would train on this one alone"
    ips = (
        f"--ips {allocation.names}"
        if allocation.names
        else "--ips A,B,... with the addresses of its hosts, the same for each"
    )
    start = f"start mtrain once on each host{f' ({allocation.one_each})' if allocation.one_each else ''} with {ips}"
    return (
        f"{problem}, but no host is named with --ips: {result}. For one job on all hosts, {start}; mtrain itself "
        "starts the ranks of a host (--nproc-per-node). For a job of this process alone, add --nnodes 1"
    )


def _number(environ: Environ, *names: str) -> int | None:
    """Return the value of the first variable among ``names`` that is a number, or None."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)


def _evidence(environ: Environ, *names: str) -> str:
    """Return the variables among ``names`` that are set, with their values, for a message."""
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _started_by(
    environ: Environ, scheduler: str, *, size: str, rank: str, one_each: str = "", also: str = ""
) -> Allocation | None:
    """Recognise a starter that gives each process the number of processes (``size``) and its own index (``rank``).

    ``also``: a further variable without which it is not this starter.
    """
    processes, place = _number(environ, size), _number(environ, rank)
    if processes is None or place is None or processes < 2 or (also and also not in environ):
        return None
    evidence = _evidence(environ, size, rank)
    return Allocation(
        scheduler=scheduler, evidence=evidence, hosts=None, processes=processes, place=place, one_each=one_each
    )


def _torchrun(environ: Environ) -> Allocation | None:
    """Recognise torchrun by the id that it gives a run.

    Without that id, ``RANK`` and ``MASTER_ADDR`` were set by another starter of torch jobs, such as Kubeflow, or by a
    user.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _started_by(environ, "torchrun", size="WORLD_SIZE", rank="RANK", one_each="without torchrun")
    return _started_by(environ, "a starter of torch jobs", size="WORLD_SIZE", rank="RANK", also="MASTER_ADDR")


def _fleetrun(environ: Environ) -> Allocation | None:
    return _started_by(
        environ, "fleetrun", size="PADDLE_TRAINERS_NUM", rank="PADDLE_TRAINER_ID", one_each="without fleetrun"
    )


def _horovodrun(environ: Environ) -> Allocation | None:
    return _started_by(environ, "horovodrun", size="HOROVOD_SIZE", rank="HOROVOD_RANK", one_each="without horovodrun")


def _open_mpi(environ: Environ) -> Allocation | None:
    return _started_by(
        environ,
        "Open MPI",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        one_each="mpirun --map-by ppr:1:node mtrain ...",
    )


def _pmi(environ: Environ) -> Allocation | None:
    """Recognise MPICH and Intel MPI."""
    return _started_by(environ, "MPI", size="PMI_SIZE", rank="PMI_RANK", one_each="mpiexec -ppn 1 mtrain ...")


def _slurm(environ: Environ) -> Allocation | None:
    """Recognise a Slurm step of several tasks, or a batch script, which runs on the first of several hosts only.

    A step of one task is a job of one host, however large the allocation around it is.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    names = '"$(scontrol show hostnames | paste -sd,)"'
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    hosts = _number(environ, "SLURM_STEP_NUM_NODES" if tasks else "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if (tasks or 1) < 2 and (tasks is not None or (hosts or 1) < 2):
        return None
    counts = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID") if tasks else ("SLURM_JOB_NUM_NODES",)
    return Allocation(
        scheduler="Slurm",
        evidence=_evidence(environ, "SLURM_JOB_ID", *counts),
        hosts=hosts,
        processes=tasks or 1,
        place=_number(environ, "SLURM_PROCID") if tasks else None,
        one_each="srun --ntasks-per-node=1 mtrain ...",
        names=names,
    )


def _lsf(environ: Environ) -> Allocation | None:
    """Recognise LSF with several hosts, where the command runs on the first host only.

    ``LSB_MCPU_HOSTS`` lists hosts and their slots in turn: "hostA 4 hostB 4".
    """
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    hosts = words[::2]
    if "LSB_JOBID" not in environ or len(hosts) < 2 or len(words) % 2:
        return None
    return Allocation(
        scheduler="LSF",
        evidence=_evidence(environ, "LSB_JOBID", "LSB_MCPU_HOSTS"),
        hosts=len(hosts),
        processes=1,
        one_each="blaunch -z HOSTS mtrain ...",
        names=",".join(hosts),
    )


def _pet(environ: Environ) -> Allocation | None:
    """Recognise Kubeflow by the variables that it sets for torchrun. ``PET_NNODES`` may be a range, "2:4"."""
    hosts = environ.get("PET_NNODES", "").rpartition(":")[2]
    if not hosts.isdecimal() or int(hosts) < 2:
        return None
    return Allocation(
        scheduler="Kubeflow",
        evidence=_evidence(environ, "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
        hosts=int(hosts),
        processes=int(hosts),
        place=_number(environ, "PET_NODE_RANK"),
    )


def _indexed_job(environ: Environ) -> Allocation | None:
    """Recognise an indexed Job of Kubernetes, whose pods know their own index but not how many there are."""
    place = _number(environ, "JOB_COMPLETION_INDEX")
    if place is None:
        return None
    evidence = _evidence(environ, "JOB_COMPLETION_INDEX")
    return Allocation(
        scheduler="Kubernetes, as an indexed Job,", evidence=evidence, hosts=None, processes=None, place=place
    )


_RECOGNISERS: tuple[Callable[[Environ], Allocation | None], ...] = (
    *(_torchrun, _fleetrun, _horovodrun),
    *(_open_mpi, _pmi, _slurm, _lsf),
    *(_pet, _indexed_job),
)
"""In the order of preference: starters that run closest to the process come first, since Slurm may start mpirun, and
mpirun torchrun."""
