"""One model's optimizer on a training loop, with a count, a schedule and a norm of its own."""

import math
from collections.abc import Callable, Mapping, Sequence
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

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Callable[[int], Rates],
        *,
        count: int = 0,
        name: str = "",
        own_order: bool = False,
    ) -> None:
        self.optimizer = optimizer
        """The backend's."""
        self.name = name
        """Name of the model; empty where it is the only one."""
        self.own_order = own_order
        """Whether its micro batch lasts until the next one, see ``Recipe.own_order``; else until its loss was taken."""
        self.schedule = schedule
        self.count = count
        """Updates begun so far, skipped ones included."""
        self.norm = math.nan
        """Norm of the last update's gradient before clipping; of an update that is read late, the one before."""
        self.rates = Rates(learning_rates=())
        """Rates of the last update; none before the first."""
        self.used = False
        """Whether a loss of the micro batch in hands was taken."""
        self.taken = 0
        """Number of micro batches of the update in hands of which a loss was taken."""
        self.done = False
        """Whether the update in hands was made, or its gradient dropped."""
        self.left_out = False
        """Whether the gradient of the update in hands was dropped."""
        self._context = ExitStack()

    def begin(self, micro: MicroBatch) -> None:
        """Prepare for the forward pass of a micro batch."""
        self.used = False
        if micro.number == 0:
            self.taken, self.done, self.left_out = 0, False, False
        # Only said where it is no default: optimizers of other projects may not know the argument.
        kept = {} if micro.moves_buffers else {"moves_buffers": False}
        self._context.enter_context(self.optimizer.micro_batch(last=micro.last, **kept))

    @property
    def pending(self) -> bool:
        """Whether it has gradients for an update that was neither made nor dropped."""
        return self.taken > 0 and not self.done

    def backward(self, loss: Any, *, weight: float, retain_graph: bool = False, divisor: float = 1.0) -> None:
        """Take a loss of the micro batch in hands; ``divisor``: see ``Optimizer.backward``."""
        kept: dict[str, Any] = {"retain_graph": True} if retain_graph else {}
        if divisor != 1:
            kept["divisor"] = divisor
        self.optimizer.backward(loss if weight == 1 else loss * weight, **kept)
        self.taken += not self.used
        self.used = True
        # Closed before the step, so that update rules run outside of mixed precision.
        if not self.own_order:
            self._context.close()

    def step(self) -> None:
        """Change the weights, and read the norm."""
        self.norm = self.optimizer.step(self._next_rates())
        self.done = True

    def step_by(self, evaluate: Callable[[], float]) -> None:
        """Change the weights by an optimizer that computes the loss as often as it likes, see ``Optimizer.step``."""
        self.norm = self.optimizer.step(self._next_rates(), evaluate)
        self.done = True

    def skip(self) -> None:
        """Drop the gradient, and read its norm; the count stays."""
        self.norm = self.optimizer.skip()
        self.done = self.left_out = True

    def gradients(self) -> Mapping[str, Any]:
        """Return the means of the gradients over the ranks by name, see ``Optimizer.gradients``."""
        return self.optimizer.gradients()

    def gradients_of(self, loss: Any, *, weight: float, retain_graph: bool) -> Mapping[str, Any]:
        """Take a loss of the micro batch in hands, and return its own gradients, see ``Optimizer.gradients``."""
        own = self.optimizer.gradients(loss if weight == 1 else loss * weight, retain_graph=retain_graph)
        self.taken += not self.used
        self.used = True
        return own

    def step_later(self, numbers: Sequence[float], tensors: Sequence[Any]) -> ReadLate:
        """Change the weights without waiting for the device, see ``Optimizer.step_later``."""
        self.done = True
        return self.optimizer.step_later(self._next_rates(), numbers, tensors)

    def _next_rates(self) -> Rates:
        # By the updates begun, skipped ones included: whether one was applied may not be known yet.
        self.rates = rates = self.schedule(self.count)
        self.count += 1
        return rates

    def close(self) -> None:
        """Leave the micro batch in hands, if there is one."""
        self._context.close()


def all_rates(steppers: Sequence[Stepper]) -> Rates:
    """Return the rates of one model, or the learning rates of several, one after the other in their order."""
    # A model that has not been updated yet has the rates of its first update.
    each = [x.rates if x.rates.learning_rates else x.schedule(x.count) for x in steppers]
    if len(steppers) == 1:
        return each[0]
    return Rates(learning_rates=[rate for rates in each for rate in rates.learning_rates])


def by_model(steppers: Sequence[Stepper]) -> dict[str, dict[str, Any]]:
    """Return what a record says of each of several models; nothing of a single one."""
    if len(steppers) == 1:
        return {}
    return {
        x.name: {"gradient_norm": x.norm if x.done else None, "updates": x.count, "updated": x.done and not x.left_out}
        for x in steppers
    }
