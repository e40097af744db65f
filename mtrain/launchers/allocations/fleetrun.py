"""Recognise Paddle's launcher (``fleetrun``, ``paddle.distributed.launch``)."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import several_processes


class Fleetrun(AllocationReader):
    """Reads the number of Paddle's trainers, and the index of this one."""

    Options = NoOptions
    distance: ClassVar[int] = 11

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the processes of all hosts."""
        return several_processes(
            environ,
            scheduler="fleetrun",
            size="PADDLE_TRAINERS_NUM",
            rank="PADDLE_TRAINER_ID",
            one_each="without fleetrun",
        )
