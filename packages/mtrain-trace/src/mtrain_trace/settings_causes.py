"""Name the likely cause of other settings of the optimizer: rates, decay, groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.differences import settings_by_array, settings_differences, some
from mtrain_trace.reading import Trace, Update

NORMS = ("norm", "bn", "ln", "bias")
"""Parts of the names of arrays that recipes often exempt from weight decay."""
LARGEST = 64
"""Largest number of steps for each update that is looked for."""
ENOUGH = 3
"""Different learning rates that must agree before two curves are called the same schedule."""


def settings(comparison: Comparison, parting: Parting, ours: Update, theirs: Update) -> list[str]:
    """Explain settings that differ."""
    differences = settings_differences(ours, theirs)
    for side, update in (("B", theirs), ("A", ours)):
        for rank, rates in enumerate(update.rank_rates):
            if rates != update.rank_rates[0]:
                first = Update(0, rates=update.rank_rates[0], groups=update.groups)
                other = Update(0, rates=rates, groups=update.groups)
                return [
                    f"rank {rank} of {side} has other settings than rank 0: {'; '.join(settings_differences(first, other)[:3])}: a "
                    "schedule that sees the metric of one rank only, or is stepped on some"
                ]
    sentences = [f"the settings of the optimizer differ (A and B): {'; '.join(differences[:4])}"]
    if moved := find_regrouped(comparison):
        sentences.append(moved)
    if any("lr " in words for words in differences) and all("lr " in words for words in differences):
        factor = theirs.rates[0].get("lr", math.nan) / ours.rates[0]["lr"] if ours.rates[0].get("lr") else math.nan
        ranks = comparison.b.ranks / comparison.a.ranks
        if ranks != 1 and math.isclose(factor, ranks, rel_tol=1e-6):
            sentences.append(
                f"the learning rate of B is {factor:g} times that of A, as its ranks are: it is scaled with the ranks"
            )
            return sentences
        if curve := explain_rates(comparison):
            sentences.append(curve)
        elif parting.update > 1:
            sentences.append(
                "the learning rates agreed before: the schedules differ in length, warm-up or unit (epochs or updates), or one "
                "was not resumed or not stepped"
            )
    return sentences


def find_regrouped(comparison: Comparison) -> str:
    """Say that weight decay differs in biases and norms alone; empty where it does not, or not alone."""
    ours, theirs = settings_by_array(comparison.a.updates[0]), settings_by_array(comparison.b.updates[0])
    moved = [n for n in ours if n in theirs and ours[n].get("weight_decay") != theirs[n].get("weight_decay")]
    if moved and all(any(part in name for part in NORMS) for name in moved):
        return f"weight decay of biases and norms differs: {some(moved)}"
    return ""


def explain_rates(comparison: Comparison) -> str:
    """Name the times at which one side steps the schedule of the other; empty where the rates are no such curve."""
    a, b = comparison.a, comparison.b
    mine, other = rates_of(a), rates_of(b)
    if not mine or not other:
        return ""
    return (
        # A schedule that begins anew may look like one that is ahead, so it is looked for first.
        _begun_anew("B", rates_before(a), other)
        or _begun_anew("A", rates_before(b), mine)
        or _plateaus("B", mine, other)
        or _plateaus("A", other, mine)
        or _often("B", b, mine, other)
        or _often("A", a, other, mine)
        or _ahead(mine, other)
    )


def rates_of(trace: Trace) -> list[float]:
    """Return the learning rate of the first parameter group at each update; empty where one is not known."""
    found = [update.rates[0].get("lr") if update.rates else None for update in trace.updates]
    return [float(rate) for rate in found if isinstance(rate, (int, float))] if None not in found else []


def rates_before(trace: Trace) -> list[float]:
    """Return the learning rates from the beginning, where another training goes on from an update; else nothing."""
    return rates_of(Trace(trace.folder, trace.processes, trace.earlier, {})) if trace.earlier else []


def _begun_anew(side: str, first: Sequence[float], resumed: Sequence[float]) -> str:
    if not _is_same(resumed, first):
        return ""
    return (
        f"the schedule of {side} begins anew at the resume, where the other side goes on: the state of the scheduler was not saved or "
        "not loaded"
    )


def _often(side: str, trace: Trace, slow: Sequence[float], fast: Sequence[float]) -> str:
    """Say how often a schedule is stepped for each update, where that is more than once."""
    passes = trace.updates[0].micro_batches
    for often in range(2, LARGEST + 1):
        # A step may come before the optimizer's own in an update, or after it: the curve then begins later. With two rates a warm-up
        # of one update would be that of many, stepped often, so two are enough only where a loop has as many passes or ranks.
        enough = 2 if often in (passes, trace.ranks) else ENOUGH
        if not any(
            _is_same(fast, slow[first::often], needed=enough if first == 0 else ENOUGH) for first in range(often + 1)
        ):
            continue
        words = f"the schedule of {side} is stepped {often} times for each update of the optimizer"
        if often == passes:
            words += f", once for each of its {passes} micro batches; step it where the optimizer steps"
        if often == trace.ranks:
            words += ", or" if often == passes else ","
            words += (
                f" once for each of its {trace.ranks} ranks (Accelerate does so with a scheduler that it has prepared)"
            )
        return words
    return ""


def _plateaus(side: str, quick: Sequence[float], slow: Sequence[float]) -> str:
    """Say that a schedule is stepped once in several updates, as one that is meant for epochs."""
    lengths = [place for place in range(1, len(slow)) if slow[place] != slow[place - 1]]
    length = lengths[0] if lengths else 0
    if length < 2 or any(place % length for place in lengths) or not _is_same(slow[::length], quick):
        return ""
    return (
        f"the schedule of {side} is stepped once in {length} updates, that of the other side at each: one counts epochs, the other "
        "updates"
    )


def _ahead(mine: Sequence[float], other: Sequence[float]) -> str:
    for steps in range(1, LARGEST + 1):
        for side, quick, late in (("B", other, mine), ("A", mine, other)):
            if _is_same(quick, late[steps:]):
                return (
                    f"the schedule of {side} is {steps} step(s) ahead of the other one: it is stepped before the optimizer and not after "
                    "it, once more at the start or at a resume, or begins at another step"
                )
    return ""


def _is_same(x: Sequence[float], y: Sequence[float], *, needed: int = ENOUGH) -> bool:
    """Return whether two curves agree where both are known, in enough different learning rates to tell."""
    pairs = list(zip(x, y))
    if len({round(one, 12) for one, _ in pairs}) < needed:
        return False
    # Rates near 0 at the end of a schedule differ by their rounding alone.
    largest = max(abs(one) for one, _ in pairs)
    return all(math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9 * largest) for one, other in pairs)
