"""One model's optimizer on a training loop, with a count, a schedule and a norm of its own."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from mtrain.core.interfaces import Array, Batch, Optimizer, Rates

ReadLate = Callable[[], tuple[float, Array]]
"""Waits for the device; returns the norm of an update and the means of its metrics, see ``Optimizer.step_later``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """A micro batch that a training loop hands out, with what its shard says about it, see ``sampler.Shares``."""

    batch: Batch
    number: int
    """Its place within the update."""
    last: bool
    shard: int
    weight: float
    """Factor of the loss."""
    moves_buffers: bool


class Stepper:
    """An optimizer that takes one loss per micro batch, and makes an update with the last one."""

    def __init__(self, optimizer: Optimizer, schedule: Callable[[int], Rates], *, count: int = 0) -> None:
        self.optimizer = optimizer
        """The backend's."""
        self.schedule = schedule
        self.count = count
        """Updates begun so far, skipped ones included."""
        self.norm = math.nan
        """Norm of the last update's gradient before clipping; of an update that is read late, the one before."""
        self.rates = Rates(learning_rates=())
        """Rates of the last update; none before the first."""
        self.used = False
        """Whether the loss of the micro batch in hands was taken."""
        self._context = ExitStack()

    def begin(self, micro: MicroBatch, *, seeds_shard: bool) -> None:
        """Prepare for the forward pass of a micro batch."""
        self.used = False
        if seeds_shard:
            self.optimizer.seed_shard(micro.shard)
        # Only said where it is no default: optimizers of other projects may not know the argument.
        kept = {} if micro.moves_buffers else {"moves_buffers": False}
        self._context.enter_context(self.optimizer.micro_batch(last=micro.last, **kept))

    def backward(self, loss: Any, *, weight: float) -> None:
        """Take the loss of the micro batch in hands."""
        self.optimizer.backward(loss if weight == 1 else loss * weight)
        self.used = True
        self._context.close()

    def step(self) -> None:
        """Change the weights, and read the norm."""
        self.norm = self.optimizer.step(self._next_rates())

    def step_later(self, numbers: Sequence[float], tensors: Sequence[Any]) -> ReadLate:
        """Change the weights without waiting for the device, see ``Optimizer.step_later``."""
        return self.optimizer.step_later(self._next_rates(), numbers, tensors)

    def _next_rates(self) -> Rates:
        self.rates = rates = self.schedule(self.count)
        self.count += 1
        return rates

    def close(self) -> None:
        """Leave the micro batch in hands, if there is one."""
        self._context.close()
