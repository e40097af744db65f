"""Refuse what a rank of a script cannot compute while it computes shards of a micro batch one after the other."""

from collections.abc import Callable
from typing import Any, Literal

from mtrain.core.interfaces import Collective, T, Tensor
from mtrain.errors import ScriptError
from mtrain.spec.trial import Trial


def check_in_turn(spec: Any, *, size: int, trial: Trial | None) -> None:
    """Refuse statistics over all shards of a micro batch where ``size`` ranks compute another number of them.

    Raises:
        ScriptError: ``spec`` asks for them.
    """
    shards = spec.cluster.shards
    if shards not in (None, size) and spec.train.sync_batchnorm:
        what = "session.prepare: sync_batchnorm takes statistics over all shards of a micro batch"
        raise ScriptError(_refusal(what, shards, size=size, trial=trial))


class InTurn:
    """The collective of such a rank: a loss cannot be exchanged with shards that are computed before or after it."""

    def __init__(
        self, collective: Collective, shards: int, in_loss: Callable[[], bool], *, trial: Trial | None = None
    ) -> None:
        """``in_loss``: whether a micro batch is in hands whose loss was not given to ``optimizer.update`` yet."""
        self.rank, self.size = collective.rank, collective.size
        self._collective, self._shards, self._in_loss, self._trial = collective, shards, in_loss, trial

    def all_reduce(self, x: Tensor, op: Literal["sum", "mean", "max"]) -> Tensor:
        """See ``Collective.all_reduce``."""
        self._check("all_reduce")
        return self._collective.all_reduce(x, op)

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        self._check("all_gather")
        return self._collective.all_gather(value)

    def _check(self, call: str) -> None:
        # Only until the loss is used: a later exchange, such as that of values to log, is over the ranks as the script means it.
        if self._in_loss():
            what = f"session.collective.{call}: called for a micro batch"
            raise ScriptError(_refusal(what, self._shards, size=self.size, trial=self._trial))


def _refusal(what: str, shards: int, *, size: int, trial: Trial | None) -> str:
    """Return why ``what`` cannot be had, and what to do."""
    advice = (
        "give as many ranks as shards (cluster.shards), or cluster.sharing=ranks in an elastic job"
        if trial is None
        else "so there is nothing to compare: compare without this backend, or with --ranks 1"
    )
    ranks = "1 rank computes" if size == 1 else f"{size} ranks compute"
    return f"{what}, but {ranks} the {shards} shards one after the other; {advice}"
