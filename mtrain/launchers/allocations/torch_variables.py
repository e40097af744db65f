"""Recognise any starter of torch jobs that sets ``MASTER_ADDR``, ``WORLD_SIZE`` and ``RANK``, such as a PyTorchJob."""

from typing import ClassVar

from mtrain.launchers.allocations.variables import Starter


class TorchVariables(Starter):
    """These variables tell nothing about hosts, and scripts set them too, so a scheduler that is recognised counts first.

    Without ``MASTER_ADDR`` they are left over in a shell.
    """

    distance: ClassVar[int] = 50
    scheduler, size, rank = "a starter of torch jobs", "WORLD_SIZE", "RANK"
    needs = "MASTER_ADDR"
