"""Recognise Paddle's launcher (``fleetrun``, ``paddle.distributed.launch``)."""

from typing import ClassVar

from mtrain.launchers.allocations.variables import Starter


class Fleetrun(Starter):
    """Reads the number of Paddle's trainers, and the index of this one."""

    distance: ClassVar[int] = 11
    scheduler, size, rank = "fleetrun", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"
    one_each = "without fleetrun"
