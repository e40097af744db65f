"""Render a comparison as one self-contained HTML file."""

from html import escape

import numpy as np

from mtrain.compare import tables, wording
from mtrain.compare.profiles import MEASURED
from mtrain.compare.referee import EXACT
from mtrain.compare.results import BackendRow, Comparison
from mtrain.compare.traces import WORDS
from mtrain.records import svg
from mtrain.records.html import document, grid
from mtrain.records.svg import Line
from mtrain_trace.differences import GRADIENT, LOSS, MEANING, WEIGHTS
from mtrain_trace.reading import AVERAGE
from mtrain_trace.rounding import GROWTH

IMAGES = (LOSS, GRADIENT, WEIGHTS, AVERAGE)
"""Quantities whose differences are drawn over updates."""


def page(result: Comparison) -> str:
    """Return the content of the HTML file."""
    body = [_head(result), _summary(result)]
    body.append(_section("Agreement", _table(tables.agreement(result), result, kind="agreement"), _bounds_note(result)))
    if result.reference is not None:
        body.append(_section("Training", _legend(result), grid(_training(result))))
        body.append(_section("Differences from " + result.reference.label, _same(result), grid(_growth(result))))
        body.append(_section("Speed", _table(tables.speeds(result), result, kind="speed"), _timing(result)))
    body.append(_section("What was run", _facts(result), *map(_plan, result.rows)))
    return document(result.title, "".join(body))


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _head(result: Comparison) -> str:
    kind = "good" if result.agree else "bad"
    about = f"{result.facts.get('updates', '')}; {result.facts.get('optimizer', '')}; {result.facts.get('data', '')}"
    return (
        f'<header><p class="what">mtrain compare: {escape(result.title)}</p>'
        f'<h1 class="{kind}">{escape(wording.headline(result))}</h1>'
        f"<p>{escape(about)}. Profile <b>{result.profile.name}</b>: {escape(result.profile.meaning)}.</p></header>"
    )


def _summary(result: Comparison) -> str:
    kinds = {True: "good", False: "bad", None: "plain"}
    sentences = wording.summary(result)
    items = [f'<li class="{kinds[each.good]}">{escape(each.text)}</li>' for each in sentences if not each.detail]
    folded = "".join(f"<p>{escape(each.text)}</p>" for each in sentences if each.detail)
    if folded:
        title = "How far update 1 of each backend is from float64"
        items.append(f'<li class="plain"><details><summary>{title}</summary>{folded}</details></li>')
    return f'<ul class="summary">{"".join(items)}</ul>' if items else ""


def _table(table: tables.Table, result: Comparison, *, kind: str) -> str:
    columns, rows = table
    verdicts = {row.label: _kind(row, result) for row in result.rows}
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f'<tr><td><i class="key f{_colour(row[0], result)}"></i>{escape(row[0])}</td>'
        + "".join(
            f"<td{_class(column, verdicts[row[0]])}>{escape(cell)}</td>"
            for column, cell in zip(columns[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(column: str, kind: str) -> str:
    return f' class="{kind}"' if column == "verdict" else ""


def _kind(row: BackendRow, result: Comparison) -> str:
    if row.outcome != "done" or row.has_drifted or row.label in result.off:
        return "bad"
    if row.label in result.against and result.against[row.label].beyond:
        return "bad"
    return "good" if row.label in result.against else "plain"


def _bounds_note(result: Comparison) -> str:
    bounds = [
        f"{WORDS[name]} {result.profile.at_start.get(name, float('nan')):.0e} in update 1"
        if name not in result.profile.throughout
        else f"{WORDS[name]} {result.profile.throughout[name]:.0e}"
        + (f" ({result.profile.at_start[name]:.0e} in update 1)" if name in result.profile.at_start else "")
        for name in MEASURED
        if name in result.profile.at_start or name in result.profile.throughout
    ]
    # Bounds of 0 everywhere are those of the profile `bitwise`.
    exact = not any(result.profile.throughout.values())
    allowed_text = "nothing but the same bits" if exact else ", ".join(bounds)
    referee_note = ""
    if result.referee is not None and result.referee.nudge is not None:
        referee_note = (
            f" Update 1 may be {EXACT:.0e} from float64 in loss and gradient norm; other bounds are "
            f"{GROWTH:.0f} times the difference of the reference from itself when every weight starts one unit in the "
            "last place away."
        )
    return (
        "<p class='note'>Largest relative differences over all updates, as in the curves. "
        f"Profile {result.profile.name} allows: "
        f"{escape(allowed_text)}.{referee_note}</p>"
    )


# -------------------------------------------------------------------------------------------------------------- curves
def _families(result: Comparison) -> list[tuple[str, BackendRow]]:
    """Group backends with the same bits: a name for each group, and one of its rows."""
    rows = {row.label: row for row in result.rows}
    return [(wording.join_words(labels), rows[labels[0]]) for labels in result.alike()]


def _colour(label: str, result: Comparison) -> int:
    # Backends with the same bits share a colour, as they share a curve.
    return next((i for i, labels in enumerate(result.alike()) if label in labels), svg.COLOURS - 1) % svg.COLOURS


def _legend(result: Comparison) -> str:
    entries = [
        f'<span><i class="key f{_colour(row.label, result)}"></i>{escape(name)}</span>'
        for name, row in _families(result)
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def _training(result: Comparison) -> list[str]:
    families = [(name, row, row.trace) for name, row in _families(result)]
    updates = result.updates
    images = []
    for title, log, values in (("loss", False, "loss"), ("gradient norm before clipping", True, "norm")):
        lines = [
            Line(
                label=name,
                colour=_colour(row.label, result),
                values=np.array([each.loss if values == "loss" else each.norm_before for each in trace.updates]),
                x=np.arange(1, len(trace.updates) + 1),
            )
            for name, row, trace in families
            if trace is not None
        ]
        images.append(svg.curves(title, lines, updates=updates, log=log))
    return images


def _same(result: Comparison) -> str:
    same = [label for label, against in result.against.items() if against.bits]
    if not same:
        return ""
    return f"<p>No difference in any update, so no curve: <b>{escape(wording.join_words(same))}</b>.</p>"


def _growth(result: Comparison) -> list[str]:
    different = [
        row for _, row in _families(result) if row.label in result.against and not result.against[row.label].bits
    ]
    if not different:
        return []
    images = []
    for name in IMAGES:
        lines = [
            Line(
                label=row.label,
                colour=_colour(row.label, result),
                values=gaps[name].curve,
                x=np.arange(1, len(gaps[name].curve) + 1),
            )
            for row in different
            if name in (gaps := result.against[row.label].difference.gaps)
        ]
        if lines:
            bound = result.profile.throughout.get(name) or None
            images.append(
                svg.curves(WORDS[name], lines, updates=result.updates, log=True, bound=bound, about=MEANING[name])
            )
    return images


# --------------------------------------------------------------------------------------------------------------- speed
def _timing(result: Comparison) -> str:
    speeds = [row.speed for row in result.rows if row.speed is not None]
    jobs, updates = int(np.min([speed.jobs for speed in speeds])), int(np.min([speed.updates for speed in speeds]))
    how = (
        f"Timed on {jobs} job{'s' if jobs > 1 else ''} of each backend without a trace, one backend after the other"
        if jobs
        else "Timed on the jobs that left the traces; their bookkeeping lies between updates"
    )
    return (
        f"<p class='note'>{how}; {updates} updates each, the first ones left out. Waits are shares of the time, for "
        "the exchange of "
        "the ranks that wait least and most; sent: rank 0 over TCP, as the kernel counts it. "
        "Start-up: from the command to the end of update 1.</p>"
    )


# --------------------------------------------------------------------------------------------------------- what was run
def _facts(result: Comparison) -> str:
    rows = {"spec": result.source, **result.facts}
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    return f"<dl>{cells}</dl>"


def _plan(row: BackendRow) -> str:
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in [*row.notes, *filter(None, [row.reason])])
    plan = f"<pre>{escape(row.plan)}</pre>" if row.plan else ""
    return f"<details><summary>{escape(row.label)}</summary>{notes}{plan}</details>"
