"""Recognise horovodrun."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import several_processes


class Horovodrun(AllocationReader):
    """Reads the number of Horovod's ranks, and the index of this one."""

    Options = NoOptions
    distance: ClassVar[int] = 12

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the processes of all hosts."""
        return several_processes(
            environ, scheduler="horovodrun", size="HOROVOD_SIZE", rank="HOROVOD_RANK", one_each="without horovodrun"
        )
