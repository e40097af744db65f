"""Describe an update for the loops of specs and scripts, and refuse to skip updates without end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtrain.core.interfaces import Progress, RankSession, Rates
from mtrain.errors import NonFiniteError

UpdateRecord = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedUpdate:
    """An update that was made, with what was measured."""

    before: Progress
    """The progress at which it was made."""
    updates_per_epoch: int | None
    """None: that shows at the end of the epoch."""
    total_updates: int
    global_batch: int
    losses: Mapping[str, float]
    """Means over the global batch."""
    rates: Rates
    norm: float
    """Norm of the gradient before clipping."""
    seconds: float
    waited_s: float
    """Seconds of these spent waiting for data, as mean over ranks."""
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Facts about each of several models by name; empty where there is one."""

    def record(self, session: RankSession) -> UpdateRecord:
        """Return the record of the update, with the measurements of this rank's ``session``.

        It has: update, epoch, position, updates_per_epoch, total_updates, losses, learning_rate (of the last group), learning_rates,
        momentum (None: each group has its own), gradient_norm, skipped_updates (number of updates of the job whose gradient was not
        finite), samples_per_s, wait_share (share of the time spent waiting for data), update_seconds, memory_bytes (of this
        rank), and the further measurements of the session. With several models also ``models``, see ``stepping.by_model``.
        """
        # Two readings of a clock may be equal, and rates are divided by their difference.
        seconds = max(self.seconds, 1e-9)
        measured = session.measure()
        return {
            "update": self.before.update,
            "epoch": self.before.epoch,
            "position": self.before.position,
            "updates_per_epoch": self.updates_per_epoch,
            "total_updates": self.total_updates,
            "losses": dict(self.losses),
            "learning_rate": self.rates.learning_rates[-1],
            "learning_rates": list(self.rates.learning_rates),
            "momentum": self.rates.momentum,
            "gradient_norm": self.norm,
            # ``before`` does not count this update yet.
            "skipped_updates": self.before.skipped + (not math.isfinite(self.norm)),
            "samples_per_second": self.global_batch / seconds,
            "data_wait_share": min(self.waited_s / seconds, 1.0),
            "update_seconds": seconds,
            **({"models": {name: dict(facts) for name, facts in self.models.items()}} if self.models else {}),
            **measured,
            "memory_bytes": int(measured["memory_bytes"]),
        }


def check_finite(before: Progress, after: Progress, *, max_nonfinite: int) -> None:
    """Refuse to go on where too many updates in a row were skipped, the last from ``before`` to ``after``.

    Raises:
        NonFiniteError: ``max_nonfinite`` or more were.
    """
    if after.skipped_in_a_row >= max_nonfinite:
        raise NonFiniteError(
            f"the gradient was not finite in {after.skipped_in_a_row} updates in a row, the last is update "
            f"{before.update} of epoch {before.epoch}; lower the learning rate, lengthen the warm-up, check the data and the loss, or use "
            "precision bf16 instead of fp16"
        )
