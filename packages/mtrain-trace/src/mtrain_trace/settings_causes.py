"""Name the likely cause of other settings of the optimizer: rates, decay, groups."""

from __future__ import annotations

import math

from mtrain_trace import schedules
from mtrain_trace.comparing import Comparison, Parting
from mtrain_trace.differences import settings_by_array, settings_differences, some
from mtrain_trace.reading import Update

NORMS = ("norm", "bn", "ln", "bias")
"""Parts of the names of arrays that recipes often exempt from weight decay."""


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
        if curve := schedules.explain(comparison):
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
