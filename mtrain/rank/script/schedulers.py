"""Schedulers of torch and Paddle that the script steps itself, with a stand-in for the optimizer that they know."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from mtrain.core.interfaces import Rates
from mtrain.errors import ScriptError

MakeScheduler: TypeAlias = Callable[[Any], Any]
"""Makes a scheduler of ``torch.optim.lr_scheduler`` from an optimizer, or one of ``paddle.optimizer.lr`` from a learning rate."""


class SteppedScheduler:
    """A scheduler whose learning rate counts at each update, as the script has stepped it."""

    def __init__(self, make: MakeScheduler, *, framework: str, learning_rate: float, factors: Sequence[float]) -> None:
        """Make the scheduler.

        Args:
            make: The script's function.
            framework: ``torch`` or ``paddle``.
            learning_rate: That of the model's rule.
            factors: One for each parameter group of the rule.

        Raises:
            ScriptError: the function returned something else than a scheduler.
        """
        self._factors = factors
        self._stand_in: Any = None
        if framework == "torch":
            torch: Any = import_module("torch")
            self._stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=learning_rate)
        given = learning_rate if self._stand_in is None else self._stand_in
        self.scheduler = make(given) if callable(make) else make
        if not (hasattr(self.scheduler, "step") and hasattr(self.scheduler, "state_dict")):
            raise ScriptError(
                f"session.prepare: `scheduler` gave a {type(self.scheduler).__name__}; expected a function that makes a scheduler, such "
                "as lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), or, with Paddle, lambda learning_rate: "
                "paddle.optimizer.lr.ReduceOnPlateau(learning_rate)"
            )
        if self._stand_in is not None:
            if getattr(self.scheduler, "optimizer", self._stand_in) is not self._stand_in:
                raise ScriptError(
                    "session.prepare: `scheduler` has an optimizer of its own; make it of the one that the function receives: "
                    "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
                )
            self._stand_in.step()  # else torch warns that the scheduler was stepped before the optimizer

    def __call__(self, update: int) -> Rates:
        """Return the learning rates as they are now."""
        return Rates(learning_rates=[self._learning_rate * factor for factor in self._factors])

    @property
    def _learning_rate(self) -> float:
        if self._stand_in is None:
            return float(self.scheduler())
        return float(self._stand_in.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``session.keep``."""
        return {"scheduler": self.scheduler.state_dict(), "learning_rate": self._learning_rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` has returned."""
        load = self.scheduler.load_state_dict if self._stand_in is not None else self.scheduler.set_state_dict
        load(state["scheduler"])
        if self._stand_in is not None:
            self._stand_in.param_groups[0]["lr"] = state["learning_rate"]
