"""Draw curves as SVG text; their colours are classes of the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mtrain.core.interfaces import Array

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 34
"""Margins in the units of the view box, in which text is 12 high."""
SPARK_WIDTH, SPARK_HEIGHT = 96, 24
COLOURS = 8
POINTS = 120
"""Largest number of updates for which a curve shows its values under the pointer."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve over updates, or over another quantity."""

    label: str
    colour: int
    values: Array
    """(U,); values that are not finite, or not positive on a log scale, are left out."""
    x: Array | None = None
    """(U,), ascending: where each value belongs; None: at its number."""
    faint: bool = False
    """Whether it stands behind another curve, as unsmoothed values do."""

    def positions(self) -> Array:
        """Return (U,) the positions of the values on the horizontal axis."""
        return np.arange(len(self.values), dtype=float) if self.x is None else np.asarray(self.x, dtype=float)


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """A linear map from values to positions on one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The frame around the curves of a drawing."""

    log: bool = False
    """Whether the vertical axis is logarithmic."""
    bound: float | None = None
    """A level that may not be crossed."""
    about: str = ""
    """Text after the title."""
    x_title: str = "update"
    x_range: tuple[float, float] | None = None
    """Ends of the horizontal axis; None: those of the curves."""
    y_range: tuple[float, float] | None = None
    """Values that the vertical axis shows at least; None: those of the curves."""
    empty: str = "no difference in any update"
    """Text of a drawing without any value."""


def curves(
    title: str, lines: Sequence[Line], *, updates: int, log: bool = False, bound: float | None = None, about: str = ""
) -> str:
    """Draw curves over updates, counted from 1. ``bound``: a level that may not be crossed; ``about``: text after the title. Without
    any value the drawing says so."""
    return chart(title, lines, Axes(log=log, bound=bound, about=about, x_range=(1.0, max(updates, 2))))


def chart(title: str, lines: Sequence[Line], axes: Axes) -> str:
    """Draw curves over the quantity of the horizontal axis."""
    visible = [(line, _visible(line, log=axes.log)) for line in lines]
    all_values = np.concatenate([values[~np.isnan(values)] for _, values in visible]) if visible else np.zeros(0)
    head = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    about_text = f'<tspan class="about" dx="8">{escape(axes.about)}</tspan>' if axes.about else ""
    head.append(f'<text class="title" x="{LEFT}" y="18">{escape(title)}{about_text}</text>')
    if not len(all_values):
        middle = f'x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT / 2}"'
        return "".join([*head, f'<text class="none" {middle} text-anchor="middle">{escape(axes.empty)}</text></svg>'])
    levels = [*all_values, *([axes.bound] if axes.bound else []), *(axes.y_range or ())]
    ticks = _decades(levels) if axes.log else _steps(float(min(levels)), float(max(levels)))
    to_axis = math.log10 if axes.log else float
    y = _Scale(low=to_axis(ticks[0]), high=to_axis(ticks[-1]), start=HEIGHT - BOTTOM, end=TOP)
    low, high = axes.x_range or _extent([line.positions() for line in lines])
    x = _Scale(low=low, high=high, start=LEFT, end=WIDTH - RIGHT)
    parts = [*head, *_frame(x, [(tick, y(to_axis(tick))) for tick in ticks], axes.x_title)]
    if axes.bound:
        parts += _bound(axes.bound, y(to_axis(axes.bound)))
    parts += [_line(line, values, x, y, axes) for line, values in visible]
    return "".join([*parts, "</svg>"])


def sparkline(label: str, x: Array, y: Array) -> str:
    """Draw a curve of a few letters' height, without axes; empty for less than two finite values."""
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(y) < 2:
        return ""
    to_x = _Scale(low=float(x.min()), high=float(x.max()), start=2.0, end=SPARK_WIDTH - 2.0)
    to_y = _Scale(low=float(y.min()), high=float(y.max()), start=SPARK_HEIGHT - 3.0, end=3.0)
    path = "L".join(f"{to_x(float(one))} {to_y(float(other))}" for one, other in zip(x, y, strict=True))
    return (
        f'<svg class="spark" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<title>{escape(label)}</title><path class="curve s0" d="M{path}"/></svg>'
    )


def _visible(line: Line, *, log: bool) -> Array:
    """Return the values of a line, with nan for those that cannot be drawn."""
    values = np.asarray(line.values, dtype=float)
    return np.where(np.isfinite(values) & ((values > 0) | (not log)), values, np.nan)


def _extent(positions: Sequence[Array]) -> tuple[float, float]:
    ends = [float(end) for each in positions if len(each) for end in (each[0], each[-1])]
    low, high = min(ends), max(ends)
    return low, high if high > low else low + 1.0


def _bound(bound: float, level: float) -> list[str]:
    text_y = level - 4 if level > TOP + 16 else level + 13
    return [
        f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level}" y2="{level}"/>',
        f'<text class="bound" x="{WIDTH - RIGHT - 2}" y="{text_y}" text-anchor="end">allowed {bound:g}</text>',
    ]


def _frame(x: _Scale, levels: Sequence[tuple[float, float]], x_title: str) -> list[str]:
    """Draw the grid and the numbers of both axes."""
    parts = []
    for tick, y in levels:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_number(tick)}</text>')
    whole = x.high - x.low >= 4
    ticks = (
        _choose_whole(x.low, x.high) if whole else [tick for tick in _steps(x.low, x.high) if x.low <= tick <= x.high]
    )
    for tick in ticks:
        text = f"{tick:.0f}" if whole else _number(tick)
        parts.append(f'<text x="{x(tick)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{text}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{escape(x_title)}</text>')
    return parts


def _line(line: Line, values: Array, x: _Scale, y: _Scale, axes: Axes) -> str:
    """Draw the pieces of a curve between gaps, and for a short one a dot with its value at each position."""
    points = [
        (i, position, float(value), y(math.log10(value) if axes.log else value))
        for i, (position, value) in enumerate(zip(line.positions().tolist(), values, strict=True))
        if not np.isnan(value)
    ]
    path, previous = [], -2
    for i, position, _, level in points:
        path.append(f"{'L' if i == previous + 1 else 'M'}{x(position)} {level}")
        previous = i
    dots = [
        f'<circle class="dot" cx="{x(position)}" cy="{level}" r="5">'
        f"<title>{escape(line.label)}, {escape(axes.x_title)} {position:.6g}: {value:.4g}</title></circle>"
        for _, position, value, level in (points if len(values) <= POINTS and not line.faint else ())
    ]
    # A path of one point cannot be seen.
    single = [
        f'<circle class="f{line.colour % COLOURS}" cx="{x(position)}" cy="{level}" r="3"/>'
        for _, position, _, level in (points if len(points) == 1 else ())
    ]
    kind = "curve faint" if line.faint else "curve"
    return f'<path class="{kind} s{line.colour % COLOURS}" d="{"".join(path)}"/>{"".join([*single, *dots])}'


def _decades(values: Sequence[float]) -> list[float]:
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    step = max(1, -(-(high - low) // 6))
    return [10.0**power for power in range(high - step * -(-(high - low) // step), high + 1, step)]


def _steps(low: float, high: float) -> list[float]:
    """Return three to seven round numbers around a range."""
    span = high - low or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(times for times in (1, 2, 5, 10) if span / (step * times) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def _choose_whole(low: float, high: float) -> list[int]:
    steps = [round(tick) for tick in _steps(low, high)]
    return sorted({tick for tick in steps if low <= tick <= high})


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"
