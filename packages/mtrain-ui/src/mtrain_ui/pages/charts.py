"""Draw the curves of one run, or of several over each other, and the charts and matrices of an evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from mtrain.core.interfaces import Array
from mtrain.core.interfaces.details import Chart, Detail, Matrix
from mtrain.records import svg
from mtrain.records.history import pace_of
from mtrain.records.smoothing import smooth_curve
from mtrain_ui.pages.timeline import Series, Timeline

MAX_POINTS = 400
"""Points of a curve that are drawn at most."""
HIGH_RATE = 3.0
"""A group of parameters whose learning rate rises above so many times that of the others has a chart of its own."""
MAX_DETAILS = 12
MAX_SERIES = 16
MAX_MATRIX = 64
MAX_LABEL = 60
LOG_FROM = 30.0
"""A loss chart whose largest value is so many times the smallest has a logarithmic axis."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A chart with its legend."""

    image: Markup
    legend: Sequence[tuple[int, str]] = ()
    """Number of the colour and name of each curve."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a matrix."""

    text: str
    share: int
    """Part of its row, in steps of 5%, for its colour."""
    right: bool


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A matrix of counts as a table."""

    title: str
    note: str
    rows_title: str
    columns_title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]] = field(default_factory=tuple)


def draw_curves(
    title: str,
    curves: Mapping[str, Series],
    axes: svg.Axes,
    *,
    smooth: bool = False,
    note: str = "",
    order: Sequence[str] = (),
) -> Drawing:
    """Draw curves in one chart.

    Args:
        title: Heading of the chart.
        curves: The curves by name.
        axes: What surrounds them.
        smooth: Draw moving averages, with the values faint behind them.
        note: A sentence below the chart.
        order: Names whose places are their colours, where several charts share them; empty: those of ``curves``.
    """
    lines, legend = [], []
    for name, (x, y) in curves.items():
        label, colour = shorten(name), list(order or curves).index(name)
        many = smooth and len(y) > 30
        if many:
            lines.append(_line(label, colour, x, y, faint=True))
        lines.append(_line(label, colour, x, smooth_curve(y) if many else y))
        legend.append((colour % svg.COLOURS, label))
    # `svg.chart` escapes every text that it writes.
    image = Markup(svg.chart(title, lines, axes))  # noqa: S704
    return Drawing(image=image, legend=legend if len(legend) > 1 or order else (), note=note)


def _line(label: str, colour: int, x: Array, y: Array, *, faint: bool = False) -> svg.Line:
    chosen = np.unique(np.linspace(0, len(x) - 1, min(len(x), MAX_POINTS)).astype(int)) if len(x) else slice(0)
    return svg.Line(label=label, colour=colour, values=y[chosen], x=x[chosen], faint=faint)


def shorten(name: str) -> str:
    """Return a name that fits into a legend."""
    return name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"


def run_charts(timeline: Timeline) -> list[Drawing]:
    """Draw the curves of one run: losses, metrics, learning rates, gradient norm, speed, waiting for data."""
    losses = timeline.losses()
    wait = timeline.column("data_wait_share", factor=100.0)
    unit = pace_of(timeline.last_update)[1]
    column = f"{unit}_per_second" if f"{unit}_per_second" in timeline.last_update else "samples_per_second"
    per_second = f"{unit} per second"
    norm = {"gradient_norm": timeline.column("gradient_norm")}
    return [
        _over_updates("loss", losses, log=_spans(losses), smooth=True),
        _over_updates("evaluation", timeline.metrics(), about=_best(timeline)),
        *_rate_charts(_merge_equal(timeline.rates())),
        _over_updates("gradient norm before clipping", norm, log=True, smooth=True),
        _over_updates(per_second, {per_second: timeline.column(column)}, floor=0.0, smooth=True),
        _over_updates("waiting for data, % of the time", {"waiting": wait}, floor=0.0, smooth=True),
    ]


def _merge_equal(rates: Mapping[str, Series]) -> dict[str, Series]:
    """Return the learning rates with one curve for all groups that have the same."""
    if len(rates) == 1:
        return dict(rates)
    curves: list[tuple[Series, list[int]]] = []
    for number, series in enumerate(rates.values()):
        same = [members for (x, y), members in curves if np.array_equal(x, series[0]) and np.array_equal(y, series[1])]
        if same:
            same[0].append(number)
        else:
            curves.append((series, [number]))
    curves.sort(key=lambda curve: curve[1][-1])  # the last group holds what no other one has
    return {
        f"group{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}": series for series, members in curves
    }


def _rate_charts(rates: Mapping[str, Series]) -> list[Drawing]:
    """Draw the learning rates; groups that rise far above the general one, which is the last, have a chart of their own."""
    peaks = {name: float(np.nanmax(y, initial=0.0)) for name, (_, y) in rates.items()}
    usual = next(reversed(peaks.values()), 0.0)
    # YOLOv5's biases begin at ten times the rate of all others, whose curve would be a flat line beside theirs.
    high = {name: rates[name] for name, peak in peaks.items() if peak > HIGH_RATE * usual > 0}
    others = {name: series for name, series in rates.items() if name not in high}
    # Both charts give a group the same colour.
    order = list(rates) if len(rates) > 1 else ()
    charts = [_over_updates("learning rate", others, floor=0.0, order=order)]
    if high:
        charts.append(_over_updates(f"learning rate of {shorten(', '.join(high))}", high, floor=0.0, order=order))
    return charts


def overlaid(timelines: Mapping[str, Timeline]) -> list[Drawing]:
    """Draw the curves of several runs over each other, one chart for each quantity that any of them has."""

    def over(title: str, series: Callable[[Timeline], Series | None], **options: Any) -> Drawing:
        found = {name: series(timeline) for name, timeline in timelines.items()}
        curves = {name: each for name, each in found.items() if each is not None and len(each[0])}
        if options.pop("may_span", False):
            options["log"] = _spans(curves)
        return _over_updates(title, curves, order=list(timelines), **options)

    def metric_of(name: str) -> Callable[[Timeline], Series | None]:
        return lambda timeline: timeline.metrics().get(name)

    metrics = list(dict.fromkeys(name for timeline in timelines.values() for name in timeline.metrics()))[:6]
    return [
        over("total loss", lambda timeline: timeline.losses().get("total"), may_span=True, smooth=True),
        *(over(shorten(name), metric_of(name)) for name in metrics),
        over("learning rate", lambda timeline: next(reversed(timeline.rates().values()), None), floor=0.0),
        over("samples per second", lambda timeline: timeline.column("samples_per_second"), floor=0.0, smooth=True),
    ]


def _over_updates(
    title: str, curves: Mapping[str, Series], *, log: bool = False, floor: float | None = None, **options: Any
) -> Drawing:
    y_range = None if floor is None or log else (floor, floor)
    last = max((float(x[-1]) for x, _ in curves.values() if len(x)), default=1.0)
    about = options.pop("about", "")
    axes = svg.Axes(log=log, about=about, x_range=(0.0, max(last, 1.0)), y_range=y_range, empty="nothing recorded")
    return draw_curves(title, curves, axes, **options)


def _spans(curves: Mapping[str, Series]) -> bool:
    """Return whether the values are positive, and too far apart for a linear axis."""
    values = np.concatenate([y[np.isfinite(y)] for _, y in curves.values()]) if curves else np.zeros(0)
    return bool(len(values) and values.min() > 0 and values.max() > LOG_FROM * values.min())


def _best(timeline: Timeline) -> str:
    best = timeline.best()
    return "" if best is None else f"best after update {best.get('update')}"


# ------------------------------------------------------------------------------------------------ details of a result
def detail_charts(details: Sequence[Detail]) -> list[Drawing]:
    """Draw the charts among the details of an evaluation."""
    return [_detail_chart(detail) for detail in details[:MAX_DETAILS] if isinstance(detail, Chart)]


def _detail_chart(chart: Chart) -> Drawing:
    curves = {}
    for number, series in enumerate(chart.series[:MAX_SERIES]):
        y = np.array([np.nan if value is None else value for value in series.y], dtype=float)
        name = series.label if series.label not in curves else f"{series.label} ({number})"
        curves[name] = (np.array(series.x, dtype=float), y)
    axes = svg.Axes(
        x_title=chart.x_title[:MAX_LABEL], x_range=chart.x_range, y_range=chart.y_range, empty="nothing to draw"
    )
    return draw_curves(shorten(chart.title), curves, axes, note=chart.note[:200])


def grids(details: Sequence[Detail]) -> list[Grid]:
    """Return the matrices among the details of an evaluation as tables."""
    return [_grid(detail) for detail in details[:MAX_DETAILS] if isinstance(detail, Matrix)]


def _grid(matrix: Matrix) -> Grid:
    rows = []
    square = matrix.rows == matrix.columns
    for number, (name, counts) in enumerate(zip(matrix.rows, matrix.counts, strict=True)):
        total = max(sum(counts), 1)
        cells = [
            Cell(text=_count(count), share=max(0, min(20, -(-20 * count // total))), right=square and place == number)
            for place, count in enumerate(counts[:MAX_MATRIX])
        ]
        rows.append((shorten(name), cells))
    return Grid(
        title=matrix.title[:200],
        note=matrix.note[:200],
        rows_title=matrix.rows_title[:MAX_LABEL],
        columns_title=matrix.columns_title[:MAX_LABEL],
        columns=[shorten(name) for name in matrix.columns[:MAX_MATRIX]],
        rows=rows[:MAX_MATRIX],
    )


def _count(count: int) -> str:
    if count == 0:
        return ""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**4)):
        if abs(count) >= size:
            return f"{count / (1000 if unit == 'k' else size):.3g}{unit}"
    return str(count)
