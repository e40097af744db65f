"""Recognise horovodrun."""

from typing import ClassVar

from mtrain.launchers.allocations.variables import Starter


class Horovodrun(Starter):
    """Reads the number of Horovod's ranks, and the index of this one."""

    distance: ClassVar[int] = 12
    scheduler, size, rank = "horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"
    one_each = "without horovodrun"
