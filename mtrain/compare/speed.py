"""Compute the speed of a job from its records."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mtrain.records.history import History, Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Speed of one backend over all its timed jobs. None: not measured."""

    jobs: int
    """Number of timed jobs; 0: measured on the traced job, whose bookkeeping lies between updates."""
    updates: int
    """Number of measured updates; the first ones of each job are left out."""
    quartiles_ms: tuple[float, float, float]
    """Wall time of an update: lower quartile, median, upper quartile."""
    samples_per_s: float
    wait_share: float
    """Share of the time spent waiting for data; median."""
    communication_shares: Sequence[float]
    """Share of an update's time spent only waiting for other ranks; median, by rank. Empty: not measured."""
    sent_bytes: float | None
    """Bytes that rank 0 sends to others over TCP per update; median."""
    memory_bytes: Sequence[float]
    """Peak memory of each rank, by rank."""
    startup_s: float
    """Seconds from the command to the end of the first update; median over jobs."""


def left_out(updates: int) -> int:
    """Return the number of updates at the start of a job that are not timed."""
    # They fill caches, and choose kernels; of a short job as many as leave something to time.
    return min(10, max(1, updates // 5)) if updates > 1 else 0


def speed_of(histories: Sequence[History], *, started: Sequence[float], batch: int, timed: bool) -> Speed:
    """Compute the speed of jobs that began at ``started`` (seconds since 1970), with ``batch`` samples per update.

    ``started`` may be shorter.

    ``timed``: False if the only job is the traced one; its sent bytes include bookkeeping and are left out.
    """
    records_by_job = [[history.updates[update] for update in sorted(history.updates)] for history in histories]
    timed_records = [record for records in records_by_job for record in records[left_out(len(records)) :]]
    seconds = np.array([record["update_seconds"] for record in timed_records], dtype=float)
    low, median, high = (float(x) for x in np.percentile(1000 * seconds, (25, 50, 75)))
    sent = [step for records in records_by_job for step in _sent_bytes(records[left_out(len(records)) :])]
    # Further trainings of a job have no start of their own.
    begins = [records[0]["time"] - start for records, start in zip(records_by_job, started, strict=False)]
    return Speed(
        jobs=len(histories) if timed else 0,
        updates=len(timed_records),
        quartiles_ms=(low, median, high),
        samples_per_s=1000 * batch / median,
        wait_share=float(np.median([record["data_wait_share"] for record in timed_records])),
        communication_shares=_communication(histories),
        sent_bytes=float(np.median(sent)) if sent and timed else None,
        memory_bytes=_by_rank(histories[-1], "memory_bytes"),
        startup_s=float(np.median(begins)),
    )


def _sent_bytes(records: Sequence[Record]) -> list[int]:
    totals = [record["sent_bytes"] for record in records if "sent_bytes" in record]
    return [after - before for before, after in pairwise(totals)]


def _communication(histories: Sequence[History]) -> list[float]:
    """Return the medians over the jobs that recorded them."""
    shares_by_job = [shares for history in histories if (shares := _by_rank(history, "communication_share"))]
    return [float(np.median(shares)) for shares in zip(*shares_by_job, strict=True)]


def _by_rank(history: History, name: str) -> list[float]:
    ranks = (history.end or {}).get("measured", ())
    return [float(measured[name]) for measured in ranks if name in measured]
