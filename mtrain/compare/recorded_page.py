"""Render comparisons of trainings that have ended as one self-contained HTML file."""

from collections.abc import Sequence
from html import escape

import numpy as np

import mtrain_trace.wording
from mtrain.compare.recorded import RecordedResult
from mtrain.records import svg
from mtrain.records.html import document, grid
from mtrain.records.svg import Line
from mtrain_trace.comparing import Comparison
from mtrain_trace.differences import MEANING


def page(results: Sequence[RecordedResult]) -> str:
    """Return the content of the HTML file."""
    agree = all(result.agree for result in results)
    first = results[0].comparisons[0].a.folder
    title = f"{first} and {', '.join(str(result.folder) for result in results)}"
    verdict = "The trainings are the same" if agree else "The trainings are not the same"
    head = (
        f'<header><p class="what">mtrain compare: {escape(title)}</p>'
        f'<h1 class="{"good" if agree else "bad"}">{verdict}</h1></header>'
    )
    body = "".join(_training(result) for result in results)
    return document(title, head + body)


def _training(result: RecordedResult) -> str:
    several = len(result.comparisons) > 1
    return "".join(
        _section(f"{result.folder}{f', optimizer {number}' if several else ''}", comparison)
        for number, comparison in enumerate(result.comparisons)
    )


def _section(title: str, comparison: Comparison) -> str:
    kind = "good" if comparison.parting is None and not comparison.findings else "bad"
    told = [*mtrain_trace.wording.among_ranks(comparison), *mtrain_trace.wording.parting(comparison)]
    first, *others = [escape(line.strip()) for line in told]
    items = "".join(f"<li class='plain'>{line}</li>" for line in others)
    sides = "".join(f"<p class='note'>{escape(line)}</p>" for line in mtrain_trace.wording.sides(comparison))
    images = grid([*_values(comparison), *_differences(comparison)])
    return (
        f"<section><h2>{escape(title)}</h2><ul class='summary'><li class='{kind}'>{first}</li>{items}</ul>{sides}{images}"
        f"<details><summary>as text</summary><pre>{escape(chr(10).join(mtrain_trace.wording.lines(comparison)))}</pre>"
        "</details></section>"
    )


def _values(comparison: Comparison) -> list[str]:
    """Draw the losses and the lengths of the gradients of both."""
    images = []
    sides = (("A", comparison.a), ("B", comparison.b))
    for title, log in (("loss", False), ("gradient norm before clipping", True)):
        lines = []
        for place, (label, trace) in enumerate(sides):
            values = [each.loss if title == "loss" else each.norm_before for each in trace.updates]
            known = np.array([np.nan if value is None else value for value in values], dtype=float)
            lines.append(Line(label=label, colour=place, values=known, x=np.arange(1, len(known) + 1)))
        if any(np.isfinite(line.values).any() for line in lines):
            images.append(svg.curves(title, lines, updates=max(len(line.values) for line in lines), log=log))
    return images


def _differences(comparison: Comparison) -> list[str]:
    """Draw the relative difference of each quantity that was recorded and differs."""
    images = []
    for what, values in comparison.curves.items():
        curve = np.array(values, dtype=float)
        if np.isfinite(curve).any() and (curve[np.isfinite(curve)] > 0).any():
            line = Line(label="B", colour=1, values=curve, x=np.arange(1, len(curve) + 1))
            title = f"difference in {what}"
            images.append(svg.curves(title, [line], updates=comparison.updates, log=True, about=MEANING[what]))
    return images
