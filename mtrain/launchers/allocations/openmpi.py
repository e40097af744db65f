"""Recognise ``mpirun`` of Open MPI."""

from typing import ClassVar

from mtrain.launchers.allocations.variables import Starter


class OpenMpi(Starter):
    """Reads the number of processes, on all hosts and on this one. The names of the hosts are not among them."""

    distance: ClassVar[int] = 20
    scheduler, size, rank = "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    local = "OMPI_COMM_WORLD_LOCAL_SIZE"
    one_each = "mpirun --map-by ppr:1:node mtrain ..."
