"""Recognise ``mpirun`` of Open MPI."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import several_processes


class OpenMpi(AllocationReader):
    """Reads the number of processes, on all hosts and on this one. The names of the hosts are not among them."""

    Options = NoOptions
    distance: ClassVar[int] = 20

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the processes of all hosts."""
        return several_processes(
            environ,
            scheduler="Open MPI",
            size="OMPI_COMM_WORLD_SIZE",
            rank="OMPI_COMM_WORLD_RANK",
            local="OMPI_COMM_WORLD_LOCAL_SIZE",
            one_each="mpirun --map-by ppr:1:node mtrain ...",
        )
