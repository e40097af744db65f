"""The learning rates of a script's loop: those of the spec's schedule, or of a function of the script."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mtrain.core.interfaces import Rates
from mtrain.core.schedule import Schedule
from mtrain.errors import ScriptError
from mtrain.rank.script.rules import RateOf


def learning_rates_of(
    spec: Any, learning_rate_of: RateOf | None, *, updates_per_epoch: int, total_updates: int
) -> Callable[[int], Rates]:
    """Return the function from the number of an update to its learning rates; ``rate_of``: the script's own, if it has one."""
    if learning_rate_of is None:
        return Schedule(spec, updates_per_epoch=updates_per_epoch, total_updates=total_updates)
    return partial(
        _own_learning_rates, learning_rate_of, [group.learning_rate_factor for group in spec.optimizer.groups]
    )


def _own_learning_rates(learning_rate_of: RateOf, factors: Sequence[float], update: int) -> Rates:
    learning_rate = float(learning_rate_of(update))
    if not math.isfinite(learning_rate) or learning_rate < 0:
        raise ScriptError(
            f"session.prepare: the schedule returned {learning_rate} for update {update}; expected a learning rate of at least 0"
        )
    return Rates(learning_rates=[learning_rate * factor for factor in factors])
