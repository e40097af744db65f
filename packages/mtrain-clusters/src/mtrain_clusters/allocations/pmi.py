"""Recognise ``mpiexec`` of MPICH and of Intel MPI."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import number, several_processes


class Pmi(AllocationReader):
    """Reads what the process manager interface (PMI) tells each process."""

    Options = NoOptions
    distance: ClassVar[int] = 21

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the processes of all hosts; None also where srun itself has set the variables (``--mpi=pmi2``)."""
        task, tasks = number(environ, "SLURM_PROCID"), number(environ, "SLURM_STEP_NUM_TASKS")
        if task is not None and (task, tasks) == (number(environ, "PMI_RANK"), number(environ, "PMI_SIZE")):
            return None
        return several_processes(
            environ,
            scheduler="MPI",
            size="PMI_SIZE",
            rank="PMI_RANK",
            local="MPI_LOCALNRANKS",
            one_each="mpiexec -ppn 1 mtrain ...",
        )
