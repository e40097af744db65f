"""Recognise any starter of torch jobs that sets ``MASTER_ADDR``, ``WORLD_SIZE`` and ``RANK``, such as a PyTorchJob."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import several_processes


class TorchVariables(AllocationReader):
    """These variables tell nothing about hosts, and scripts set them too, so a scheduler that is recognised counts first."""

    Options = NoOptions
    distance: ClassVar[int] = 50

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the processes of all hosts. Without ``MASTER_ADDR`` they are left over in a shell."""
        if "MASTER_ADDR" not in environ:
            return None
        return several_processes(environ, scheduler="a starter of torch jobs", size="WORLD_SIZE", rank="RANK")
