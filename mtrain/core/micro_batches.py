"""Find the largest micro batch that fits into memory (``train.max_micro_batch: auto``): pure functions on measurements.

A trial measures the memory of one rank for a micro batch. Trials grow from 1, at least twofold, as long as a straight line
through the last two measurements stays within the budget, so that none is expected to run out of memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

SHARE = 0.8
"""Part of the free memory that ranks may use: the rest is for loaders, exchanged gradients and other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The largest micro batch that fits."""

    micro_batch: int
    """0: not even 1 fits."""
    measured: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each trial that was within the budget, by micro batch."""
    too_large: int | None = None
    """The next larger micro batch that divides a rank's share; None: there is none."""


def divisors(share: int) -> list[int]:
    """Return the micro batches into which a rank's ``share`` of the global batch can be divided, in rising order."""
    return [micro for micro in range(1, share + 1) if share % micro == 0]


def grown(share: int, measure: Callable[[int], int | None], *, budget: Callable[[], float]) -> Choice:
    """Measure growing micro batches and choose the largest one that fits.

    Args:
        share: Samples of one rank in an update.
        measure: Returns the bytes that a rank needs for a micro batch; None: its trial ended without a result. Where that
            is the first, the next one is tried too: statistics of a single sample may not exist.
        budget: Returns the bytes that one rank may use; the first trial may find a device.
    """
    measured: dict[int, int] = {}
    too_large = None
    for number, micro in enumerate(_trials(divisors(share))):
        expected = expectation(measured, micro)
        too_much = expected is not None and expected > budget()
        needed = None if too_much else measure(micro)
        if needed is None and number == 0:
            continue
        if needed is None or needed > budget():
            too_large = micro
            break
        measured[micro] = int(needed)
    return fitting(share, Choice(micro_batch=0, measured=measured, too_large=too_large), budget_bytes=budget())


def fitting(share: int, found: Choice, *, budget_bytes: float) -> Choice:
    """Choose again from what was measured, for a budget that is not larger than that of the trials."""
    measured = {micro: needed for micro, needed in found.measured.items() if needed <= budget_bytes}
    best, end = max(measured, default=0), found.too_large
    for micro in divisors(share):
        if micro <= best or micro in found.measured or (end is not None and micro >= end):
            continue
        expected = expectation(found.measured, micro)
        if expected is not None and expected <= budget_bytes and measured:
            best = micro
    above = [micro for micro in divisors(share) if micro > best]
    return Choice(micro_batch=best, measured=found.measured, too_large=min(above, default=None))


def _trials(candidates: Sequence[int]) -> list[int]:
    """Return the candidates to measure: each at least twice the one before, and the last."""
    chosen: list[int] = []
    for micro in candidates:
        if not chosen or micro >= 2 * chosen[-1] or micro == candidates[-1]:
            chosen.append(micro)
    return chosen


def expectation(measured: Mapping[int, int], micro: int) -> float | None:
    """Return the bytes for ``micro`` on the line through the two largest measurements; None: there are fewer."""
    if len(measured) < 2:
        return None
    low, high = sorted(measured)[-2:]
    slope = max(measured[high] - measured[low], 0) / (high - low)
    return measured[high] + slope * (micro - high)
