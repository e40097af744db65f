"""Describe an update for the loops of specs and scripts, and refuse to skip updates without end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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

    def record(self, session: RankSession) -> UpdateRecord:
        """Return the record of the update, with the measurements of this rank's ``session``.

        It has: update, epoch, position, updates_per_epoch, total_updates, losses, rate (of the last group), rates,
        momentum (None: each group has its own), norm, skipped (number of updates of the job whose gradient was not
        finite), samples_per_s, wait_share (share of the time spent waiting for data), seconds, memory_bytes (of this
        rank), and the further measurements of the session.
        """
        seconds = max(self.seconds, 1e-9)
        measured = session.measure()
        return {
            "update": self.before.update,
            "epoch": self.before.epoch,
            "position": self.before.position,
            "updates_per_epoch": self.updates_per_epoch,
            "total_updates": self.total_updates,
            "losses": dict(self.losses),
            "rate": self.rates.rates[-1],
            "rates": list(self.rates.rates),
            "momentum": self.rates.momentum,
            "norm": self.norm,
            "skipped": self.before.skipped + (not math.isfinite(self.norm)),
            "samples_per_s": self.global_batch / seconds,
            "wait_share": min(self.waited_s / seconds, 1.0),
            "seconds": seconds,
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
            f"{before.update} of epoch {before.epoch}; lower the rate, lengthen the warm-up, check the data and the loss, or use "
            "precision bf16 instead of fp16"
        )
