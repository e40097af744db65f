"""One model's optimizer on a training loop, with a count, a schedule and a norm of its own."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mtrain.core.interfaces import Array, Batch, Optimizer, Rates

ReadLate = Callable[[], tuple[float, Array]]
"""Waits for the device; returns the norm of an update and the means of its metrics, see ``Optimizer.step_later``."""


class Use(StrEnum):
    """What an optimizer has done with the micro batch in hands."""

    FRESH = "fresh"
    """No loss of it was taken."""
    TAKEN = "taken"
    """The gradients of its losses are those of this rank."""
    EXCHANGED = "exchanged"
    """The gradients are means over the ranks."""
    ASKED = "asked"
    """A step was asked for, which the last micro batch of the update makes."""
    STEPPED = "stepped"
    """The update was made."""
    SKIPPED = "skipped"
    """The gradient of the update was dropped."""
    SEARCHING = "searching"
    """A closure is running that has given no loss yet."""
    SEARCHED = "searched"
    """A closure is running that has given one."""


MADE = (Use.ASKED, Use.STEPPED, Use.SKIPPED)
"""States after a step."""


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
        self.use = Use.FRESH
        self.taken = 0
        """Number of micro batches of the update in hands of which a loss was taken."""
        self.asked = ""
        """What was asked for in earlier micro batches of the update in hands: ``step``, ``skip``, or neither."""
        self._context = ExitStack()

    def begin(self, micro: MicroBatch) -> None:
        """Prepare for the forward pass of a micro batch."""
        self.use = Use.FRESH
        if micro.number == 0:
            self.taken, self.asked = 0, ""
        # Only said where it is no default: optimizers of other projects may not know the argument.
        kept = {} if micro.moves_buffers else {"moves_buffers": False}
        self._context.enter_context(self.optimizer.micro_batch(last=micro.last, **kept))

    @property
    def used(self) -> bool:
        """Whether a loss of the micro batch in hands was taken; in a closure, one of this call."""
        return self.use is not Use.FRESH and self.use is not Use.SEARCHING

    @property
    def done(self) -> bool:
        """Whether the update in hands was made, or its gradient dropped."""
        return self.use is Use.STEPPED or self.use is Use.SKIPPED

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
        self._take(Use.SEARCHED if self.use in (Use.SEARCHING, Use.SEARCHED) else Use.TAKEN)
        # Closed before the step, so that update rules run outside of mixed precision.
        if not self.own_order:
            self._context.close()

    def _take(self, use: Use) -> None:
        self.taken += self.use is Use.FRESH
        self.use = use

    def step(self) -> None:
        """Change the weights, and read the norm."""
        self.norm = self.optimizer.step(self._next_rates())
        self.use = Use.STEPPED

    def step_by(self, evaluate: Callable[[], float]) -> None:
        """Change the weights by an optimizer that computes the loss as often as it likes, see ``Optimizer.step``."""
        self._take(Use.SEARCHING)
        self.norm = self.optimizer.step(self._next_rates(), evaluate)
        self.use = Use.STEPPED

    def skip(self) -> None:
        """Drop the gradient, and read its norm; the count stays."""
        self.norm = self.optimizer.skip()
        self.use = Use.SKIPPED

    def gradients(self) -> Mapping[str, Any]:
        """Return the means of the gradients over the ranks by name, see ``Optimizer.gradients``."""
        self.use = Use.EXCHANGED
        return self.optimizer.gradients()

    def gradients_of(self, loss: Any, *, weight: float, retain_graph: bool) -> Mapping[str, Any]:
        """Take a loss of the micro batch in hands, and return its own gradients, see ``Optimizer.gradients``."""
        own = self.optimizer.gradients(loss if weight == 1 else loss * weight, retain_graph=retain_graph)
        self._take(Use.EXCHANGED)
        return own

    def step_later(self, numbers: Sequence[float], tensors: Sequence[Any]) -> ReadLate:
        """Change the weights without waiting for the device, see ``Optimizer.step_later``."""
        self.use = Use.STEPPED
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
        x.name: {"gradient_norm": x.norm if x.done else None, "updates": x.count, "updated": x.use is Use.STEPPED}
        for x in steppers
    }
