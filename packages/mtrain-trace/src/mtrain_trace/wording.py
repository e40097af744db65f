"""Print a comparison: the verdict, what parted first, its likely cause, and how the differences grew."""

from __future__ import annotations

import math
from typing import Any

from mtrain_trace import comparing, differences
from mtrain_trace.comparing import Comparison
from mtrain_trace.reading import Trace

FORM = 1


def text(comparisons: list[Comparison]) -> list[str]:
    """Return all comparisons of two folders, one for each optimizer."""
    found = []
    for number, comparison in enumerate(comparisons):
        found += [f"optimizer {number}:"] if len(comparisons) > 1 else []
        found += lines(comparison)
    return found


def lines(comparison: Comparison) -> list[str]:
    """Return the comparison as text for a terminal or a log."""
    a, b = comparison.a, comparison.b
    found = [*sides(comparison), ""]
    found += [*among_ranks(comparison), *parting(comparison), "", *_table(comparison)]
    if len(a.updates) != len(b.updates):
        found.append(f"A has {len(a.updates)} updates, B {len(b.updates)}; the first {comparison.updates} are compared")
    return found


def sides(comparison: Comparison) -> list[str]:
    """Return what the two trainings are, and what of them is not seen."""
    told = [f"A {_describe(comparison.a)}", f"B {_describe(comparison.b)}"]
    return [*told, *(f"note: {remark}" for remark in comparison.remarks)]


def parting(comparison: Comparison) -> list[str]:
    """Return the verdict, and where and why the trainings part."""
    first = comparison.parting
    if first is None:
        return [f"{comparison.verdict.upper()} over {comparison.updates} updates{_largest(comparison)}"]
    where = "before the first update" if first.update == 0 else f"in update {first.update}"
    size = "" if math.isinf(first.size) else f", {first.size:.2g} of its size"
    found = [f"DIFFERENT: {_plural(first.what)} first {where}{size}"]
    found += [f"  {_capital(sentence)}." for sentence in comparison.sentences]
    if first.arrays:
        found.append(f"  arrays: {', '.join(first.arrays[:5])}")
    if not comparing.has_details(comparison):
        unseen = comparing.without_details(comparison)
        which = "both" if len(unseen) > 1 else "A" if unseen[0] is comparison.a else "B"
        if any(not trace.measured for trace in unseen):
            found.append(f"  for each array, record {which} again with: mtrain-trace run --at {first.update} ...")
        if any(trace.measured for trace in unseen):
            found.append(f"  for each parameter group, train {which} again with: -o report.trace=state")
    return found


def among_ranks(comparison: Comparison) -> list[str]:
    """Return what is wrong among the ranks of B."""
    return [f"RANKS OF B: {_capital(words)}." for words in comparison.findings]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as a value for JSON."""
    parting = comparison.parting
    return {
        "form": FORM,
        "verdict": comparison.verdict,
        "updates": comparison.updates,
        "same_bits_until": comparison.bits_until,
        "parting": None
        if parting is None
        else {
            "what": parting.what,
            "update": parting.update,
            "size": _number(parting.size),
            "arrays": parting.arrays,
            "causes": comparison.sentences,
        },
        "differences": {what: [_number(value) for value in curve] for what, curve in comparison.curves.items()},
        "remarks": comparison.remarks,
        "findings": comparison.findings,
    }


def _number(value: float) -> Any:
    return value if math.isfinite(value) else None


def _describe(trace: Trace) -> str:
    first = trace.processes[0]
    described = trace.optimizer_facts
    parts = [
        f"{trace.ranks} rank{'s' if trace.ranks > 1 else ''}",
        f"{trace.samples_per_update} samples an update" if trace.samples_per_update else "samples not seen",
        f"{described['rule']}",
        f"{first.get('framework', 'torch')} {first.get(first.get('framework', 'torch'), '?')}",
    ]
    if trace.updates and trace.updates[0].micro_batches > 1:
        parts.insert(2, f"{trace.updates[0].micro_batches} micro batches")
    return f"{trace.folder}: {len(trace.updates)} updates, " + ", ".join([*parts, *first.get("stacks", [])])


def _largest(comparison: Comparison) -> str:
    sizes = {
        what: max((v for v in curve if not math.isnan(v)), default=0.0) for what, curve in comparison.curves.items()
    }
    shown = [f"{what} {size:.2g}" for what, size in sizes.items() if size > 0]
    return f"; largest relative differences: {', '.join(shown)}" if shown else ""


def _table(comparison: Comparison) -> list[str]:
    """Return the differences at the first updates, at powers of two and at the parting."""
    marked = {1, 2, 3, comparison.updates} | {1 << power for power in range(30)}
    if comparison.parting is not None:
        marked |= {comparison.parting.update, comparison.parting.update - 1}
    columns = [what for what, curve in comparison.curves.items() if any(not math.isnan(value) for value in curve)]
    if not columns or not comparison.updates:
        return []
    rows = [["update", *columns]]
    for number in sorted(number for number in marked if 1 <= number <= comparison.updates):
        rows.append([str(number), *(_cell(comparison.curves[what][number - 1]) for what in columns)])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def _cell(value: float) -> str:
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "other"
    return "same" if value == 0 else f"{value:.1e}"


def _plural(what: str) -> str:
    return what if what.endswith("s") or what in (differences.CLIP, differences.SKIPPED) else f"the {what}"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
