"""What a loss counts in its update, where it is a sum, or a mean over what a script has counted, such as tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtrain.core.interfaces import Collective
from mtrain.core.samples.sampler import Shares
from mtrain.core.update.stepping import MicroBatch
from mtrain.errors import ScriptError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossKind:
    """What a script says of the loss of a micro batch."""

    reduction: str = "mean"
    weight: float | None = None
    """What the loss is a mean over, in number; None: samples."""

    @classmethod
    def of(cls, reduction: str, weight: Any) -> "LossKind":
        """Check what a script has given.

        Raises:
            ScriptError: the reduction is not known, or the weight is no number of at least 0.
        """
        if reduction not in ("mean", "sum"):
            raise ScriptError(f"optimizer.update: reduction={reduction!r} given; expected 'mean' or 'sum'")
        if weight is None:
            return MEAN if reduction == "mean" else cls(reduction=reduction)
        # A tensor on a device is read here, and waited for.
        is_number = not isinstance(weight, bool | str) and math.prod(getattr(weight, "shape", ())) == 1
        try:
            value = float(weight) if is_number else math.nan
        except TypeError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ScriptError(
                f"optimizer.update: weight={weight!r} given; expected a single finite number of at least 0: how many "
                "tokens, or other parts of samples, this micro batch has"
            )
        return cls(reduction=reduction, weight=value)


MEAN = LossKind()
"""The mean over the samples of a micro batch."""


class LossWeights:
    """The weights of one model's losses in the update in hands."""

    def __init__(self, shares: Shares, collective: Collective) -> None:
        self._shares, self._collective = shares, collective
        self._unit = 1.0
        """The mean weight over the ranks in the first micro batch, by which all losses of the update are divided."""
        self._sum = 0.0
        """Of the weights of this rank's micro batches so far."""
        self._is_weighted = False

    def take(
        self, kind: LossKind, micro: MicroBatch, *, is_further: bool, place: Callable[[], str]
    ) -> tuple[float, float]:
        """Return the factor of a loss, and by what the mean of all over micro batches and ranks must be divided once it is known.

        Every rank must call, with a weight or without one. ``place`` returns where the loop is, for messages.

        Raises:
            ScriptError: all weights of the update are 0, or its losses do not go together.
        """
        passes, is_first, is_weighted = (
            self._shares.passes,
            micro.number == 0 and not is_further,
            kind.weight is not None,
        )
        mixes = is_weighted != self._is_weighted or (is_weighted and is_further)
        if passes > 1 and not is_first and mixes:
            raise ScriptError(
                f"optimizer.update(loss, weight=...) ({place()}): a weight given for some losses of an update of {passes} micro batches; "
                "give it for each micro batch, of one loss, or train with accumulate=1 and a rank for each shard"
            )
        self._is_weighted = is_weighted
        # A rank without samples of its own computes those of another one, which count there.
        counts = float(micro.weight > 0)
        if kind.weight is None:
            return (micro.weight if kind.reduction == "mean" else counts * passes * self._shares.size), 1.0
        own = kind.weight * counts
        self._sum = own if micro.number == 0 else self._sum + own
        mean = self._mean(self._sum) / (micro.number + 1) if micro.number == 0 or micro.last else math.nan
        if micro.number == 0:
            # Gradients stay as large as those of a mean, so that they fit into half precision.
            self._unit = mean or 1.0
        if micro.last and mean == 0:
            raise ScriptError(
                f"optimizer.update(loss, weight=...) ({place()}): all weights of the update are 0, so it has no mean; leave out batches "
                "that nothing counts in"
            )
        factor = (own if kind.reduction == "mean" else counts) / self._unit
        return factor, mean / self._unit if micro.last else 1.0

    def _mean(self, value: float) -> float:
        return float(self._collective.all_reduce(np.array([value]), "mean")[0])
