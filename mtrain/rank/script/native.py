"""A native optimizer that a script makes for its model, ``lambda model: torch.optim.SGD(model.parameters(), lr=0.1)``."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from mtrain.errors import ScriptError
from mtrain.rank.script.schedulers import SteppedScheduler, adopt, groups_of_native

NativeOptimizer: TypeAlias = Callable[[Any], Any]
"""Makes an optimizer of the framework from the model."""


def is_native(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is a function that makes a native optimizer, and not a rule of mtrain's."""
    return callable(optimizer) and not hasattr(optimizer, "section") and not inspect.isclass(optimizer)


class RecordingOptimizer:
    """A ``NativeOptimizer`` that records the learning rate of the optimizer it has made."""

    def __init__(self, make: NativeOptimizer) -> None:
        self._make = make
        self.learning_rate: float | None = None
        self.groups: list[dict[str, Any]] = []
        """Learning rate and momentum of its parameter groups, as it was made."""
        self.scheduler: SteppedScheduler | None = None
        """The scheduler that the script has made with it."""

    def __call__(self, model: Any) -> Any:
        """Make the optimizer.

        Raises:
            ScriptError: it has no learning rate, or the learning rate 0.
        """
        optimizer = self._make(model)
        # A scheduler of torch is made of its optimizer, so a function may return both.
        if isinstance(optimizer, tuple) and len(optimizer) == 2:
            optimizer, scheduler = optimizer
            self.scheduler = adopt(scheduler, optimizer)
        # A scheduler of torch puts a function in the place of the method, which steps this optimizer and none of its copies.
        getattr(optimizer, "__dict__", {}).pop("step", None)
        learning_rate = _learning_rate_of(optimizer)
        if learning_rate is None or learning_rate <= 0:
            given = "without a learning rate" if learning_rate is None else f"with the learning rate {learning_rate:g}"
            raise ScriptError(
                f"session.prepare: `optimizer` returned a {type(optimizer).__name__} {given}; expected an optimizer of torch.optim or "
                "paddle.optimizer with a learning rate above 0"
            )
        self.learning_rate = learning_rate
        self.groups = groups_of_native(optimizer)
        return optimizer


def _learning_rate_of(optimizer: Any) -> float | None:
    if hasattr(optimizer, "get_lr"):
        return float(optimizer.get_lr())
    groups = getattr(optimizer, "param_groups", None)
    return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None


def record_native(optimizer: Any, outside_paths: frozenset[str]) -> RecordingOptimizer | None:
    """Return the script's native optimizer; None if ``optimizer`` is a rule of mtrain's.

    Raises:
        ScriptError: the user of ``mtrain run`` has set a value of the section ``optimizer``.
    """
    if optimizer is None or not is_native(optimizer):
        return None
    if outside := [path for path in sorted(outside_paths) if path.startswith("optimizer.")]:
        raise ScriptError(
            f"session.prepare: the script makes an optimizer of its own, but this job was started with {outside[0]}; leave "
            "one of them out"
        )
    return RecordingOptimizer(optimizer)
