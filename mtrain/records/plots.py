"""Draw the curves of a run on one page: as ``results.png``, and as a figure. Only this module of ``report`` imports matplotlib.

It uses matplotlib without a window system, so a figure from here is in no list of pyplot's and needs no closing.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mtrain.core.interfaces import Array
from mtrain.records.history import History, learning_rate_of, pace_of, read_history
from mtrain.records.smoothing import smooth_curve
from mtrain.records.wording import headline_metrics
from mtrain.spec import collector, outputs

COLOURS = ("#1f6fb4", "#d9622b", "#2f9e5b", "#8a56b0", "#b8324f", "#7a7a7a")
INK = "#333333"
FAINT = "#e4e4e4"
# Room for the widest labels, such as 2.8 x 10^-12 at the left of each plot, and for the second axis of the speed. A layout
# that measures the labels, such as matplotlib's "constrained", takes as long as the drawing itself.
MARGINS = {"left": 0.08, "right": 0.955, "bottom": 0.068, "top": 0.92, "wspace": 0.2, "hspace": 0.3}


MOST_UPDATES = 4000
"""Updates that are drawn at most, three for each pixel of a plot; a longer run would take memory without end."""


class Curves(Figure):
    """A figure that notebooks show as an image, whether or not ``%matplotlib inline`` was typed."""

    def _repr_png_(self) -> bytes:
        image = BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()


def draw_results(folder: Path) -> Path | None:
    """Draw ``results.png`` in a run folder from its ``metrics.jsonl``. Return its path; None without records."""
    path = folder / "results.png"
    with collector.pause():
        figure = curves(folder)
        if figure is None:
            return None
        with outputs.replace(path) as file:
            figure.savefig(file, format="png")
    return path


def curves(folder: Path) -> Curves | None:
    """Return the curves of a run folder as a figure; None without records."""
    history = read_history(folder / "metrics.jsonl", most_updates=MOST_UPDATES)
    if not history.updates and not history.evaluations:
        return None
    # The classes of matplotlib and not pyplot, which would choose a window system and keep a list of figures.
    figure = Curves(figsize=(12, 7.2), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, gridspec_kw=MARGINS)
    figure.suptitle(f"{folder.resolve().name}: {_title(history)}", fontsize=12, color=INK, x=0.012, ha="left")
    _draw_losses(axes[0, 0], history)
    _draw_metrics(axes[0, 1], history)
    _draw_learning_rate(axes[1, 0], history)
    _draw_speed(axes[1, 1], history)
    return figure


def _title(history: History) -> str:
    parts = [f"{max(history.updates, default=-1) + 1} updates"]
    for name in _headline_names(history)[:2]:
        values = [
            metrics[name] for record in history.evaluations.values() if name in (metrics := headline_metrics(record))
        ]
        parts.append(f"best {name} {max(values):.3f}")
    return ", ".join(parts)


def _headline_names(history: History) -> list[str]:
    """Return the names of the headline metrics in the records of this run."""
    return list(dict.fromkeys(name for record in history.evaluations.values() for name in headline_metrics(record)))


def _draw_losses(axes: Axes, history: History) -> None:
    _frame(axes, "loss")
    positive = False
    names = dict.fromkeys(name for record in history.updates.values() for name in record.get("losses", {}))
    for name, colour in zip(names, _cycle(len(names)), strict=True):
        x, y = _series(history.updates, lambda r, n=name: r.get("losses", {}).get(n))
        axes.plot(x, y, color=colour, alpha=0.22, linewidth=0.8)
        axes.plot(x, smooth_curve(y), color=colour, linewidth=1.7, label=name)
        positive = positive or bool((y > 0).any())
    # For some models the total loss is the sum of the others times the batch size, so that only a logarithmic axis can
    # show all of them.
    if positive:
        axes.set_yscale("log", nonpositive="clip")
    _legend(axes, names)


def _draw_metrics(axes: Axes, history: History) -> None:
    _frame(axes, "evaluation")
    names = _headline_names(history)[:4]
    for name, colour in zip(names, _cycle(len(names)), strict=True):
        x, y = _series(history.evaluations, lambda r, n=name: r.get("metrics", {}).get(n))
        # The best value is written in the legend, because next to the curve it could cover labels of other curves.
        label = f"{name}  best {y.max():.3f}" if len(y) else name
        axes.plot(x, y, color=colour, linewidth=1.7, marker="o", markersize=3, label=label)
        if len(y):
            best = int(np.argmax(y))
            axes.plot(x[best], y[best], color=colour, marker="o", markersize=8, markerfacecolor="none")
    if names:
        axes.set_ylim(0, 1.05 if _top(history, names) > 0.5 else None)
    else:
        _empty(axes, "not evaluated yet")
    _legend(axes, names)


def _top(history: History, names: Sequence[str]) -> float:
    values = [record["metrics"].get(name) for record in history.evaluations.values() for name in names]
    return max((value for value in values if isinstance(value, int | float)), default=0.0)


def _draw_learning_rate(axes: Axes, history: History) -> None:
    _frame(axes, "learning rate")
    x, y = _series(history.updates, learning_rate_of)
    axes.plot(x, y, color=COLOURS[0], linewidth=1.7)
    axes.set_ylim(bottom=0)
    # Every tick label shows the full number, because matplotlib would write a common factor over the title.
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _draw_speed(axes: Axes, history: History) -> None:
    unit = next((pace_of(record)[1] for record in history.updates.values() if record.get("unit")), "images")
    _frame(axes, f"{unit} per second")
    x, y = _series(history.updates, lambda r: pace_of(r)[0])
    axes.plot(x, y, color=COLOURS[2], alpha=0.22, linewidth=0.8)
    axes.plot(x, smooth_curve(y), color=COLOURS[2], linewidth=1.7)
    axes.set_ylim(bottom=0)
    x, share = _series(history.updates, lambda r: r.get("data_wait_share"))
    if len(share):
        right = axes.twinx()
        right.plot(x, smooth_curve(100 * share), color=COLOURS[5], linewidth=1.2, linestyle="--")
        right.set_ylim(0, max(10.0, 1.1 * float(np.max(100 * share))))
        right.set_ylabel("waiting for data, % of the time (dashed)", color=COLOURS[5], fontsize=9)
        right.tick_params(colors=COLOURS[5], labelsize=9)
        right.spines[["top", "left", "right", "bottom"]].set_visible(False)


def _series(records: Mapping[int, Mapping[str, Any]], value: Any) -> tuple[Array, Array]:
    pairs = [(update, value(record)) for update, record in sorted(records.items())]
    points = [(update, float(number)) for update, number in pairs if isinstance(number, int | float)]
    return np.array([u for u, _ in points], dtype=float), np.array([v for _, v in points], dtype=float)


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("update", fontsize=9, color=INK)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")


def _legend(axes: Axes, names: Any) -> None:
    if names:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#999999")
