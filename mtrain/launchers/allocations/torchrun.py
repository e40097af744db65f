"""Recognise torchrun (``torch.distributed.run``) by the id that it gives a run."""

from collections.abc import Mapping
from typing import ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader, NoOptions
from mtrain.launchers.allocations.variables import several_processes


class Torchrun(AllocationReader):
    """Without that id, ``RANK`` and ``MASTER_ADDR`` were set by another starter of torch jobs, or by a user."""

    Options = NoOptions
    distance: ClassVar[int] = 10

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the processes of all hosts; torchrun tells no names."""
        if "TORCHELASTIC_RUN_ID" not in environ:
            return None
        return several_processes(
            environ, scheduler="torchrun", size="WORLD_SIZE", rank="RANK", one_each="without torchrun"
        )
