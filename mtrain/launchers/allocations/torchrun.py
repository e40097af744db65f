"""Recognise torchrun (``torch.distributed.run``) by the id that it gives a run."""

from typing import ClassVar

from mtrain.launchers.allocations.variables import Starter


class Torchrun(Starter):
    """Without that id, ``RANK`` and ``MASTER_ADDR`` were set by another starter of torch jobs, or by a user."""

    distance: ClassVar[int] = 10
    scheduler, size, rank = "torchrun", "WORLD_SIZE", "RANK"
    needs = "TORCHELASTIC_RUN_ID"
    one_each = "without torchrun"
