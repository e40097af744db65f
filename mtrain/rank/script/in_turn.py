"""Refuse what one rank cannot compute when it trains the parts of several ranks in turn, as in ``mtrain compare``."""

from collections.abc import Callable
from typing import Any, Literal

from mtrain.core.interfaces import Collective, T, Tensor
from mtrain.errors import ScriptError
from mtrain.spec.trial import Trial

_ADVICE = "compare without this backend, or with --ranks 1"


def check_in_turn(spec: Any, trial: Trial | None) -> None:
    """Refuse statistics over all ranks where one rank has their parts in turn.

    Raises:
        ScriptError: ``spec`` asks for them.
    """
    if trial is not None and trial.shares > 1 and spec.train.sync_batchnorm:
        raise ScriptError(
            f"one process cannot compute what {trial.shares} ranks compute, so there is nothing to compare: "
            f"sync_batchnorm takes statistics over the parts of all ranks, which this one trains in turn; {_ADVICE}"
        )


class InTurn:
    """The collective of a rank that trains the parts of several in turn: a loss cannot be exchanged with parts to come."""

    def __init__(self, collective: Collective, shares: int, in_loss: Callable[[], bool]) -> None:
        """``in_loss``: whether a micro batch is in hands whose loss was not given to ``optimizer.update`` yet."""
        self.rank, self.local_rank, self.size = collective.rank, collective.local_rank, collective.size
        self._collective, self._shares, self._in_loss = collective, shares, in_loss

    def all_reduce(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """See ``Collective.all_reduce``."""
        self._check("all_reduce")
        return self._collective.all_reduce(x, op)

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        self._check("all_gather")
        return self._collective.all_gather(value)

    def _check(self, call: str) -> None:
        if self._in_loss():
            raise ScriptError(
                f"one process cannot compute what {self._shares} ranks compute, so there is nothing to compare: the script "
                f"calls session.collective.{call} for a micro batch, and this rank trains the parts of the ranks in turn; "
                f"{_ADVICE}"
            )
