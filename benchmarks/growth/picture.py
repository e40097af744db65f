"""One picture of how cost grows: a small plot for each row of ``docs/how-cost-grows.md``, with its exponent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
INK, FAINT, OURS, LIMIT = "#333333", "#e4e4e4", "#1f6fb4", "#b8324f"
COLOURS = (OURS, "#d9622b", "#2f9e5b", "#8a56b0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One small plot."""

    axis: str
    """The measurement, a key of ``benchmarks.scale.AXES``."""
    title: str
    size: str
    """Key of a row that is the size."""
    columns: Mapping[str, str]
    """Key of a row -> its name in the legend."""
    before: Mapping[str, Sequence[tuple[float, float]]] | None = None
    """What was measured before something was mended: name -> (size, value)."""


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of growth between the smallest and the largest size; nan where it cannot be told."""
    if len(sizes) < 2 or min(values[0], values[-1]) <= 0 or sizes[0] == sizes[-1]:
        return math.nan
    return math.log(values[-1] / values[0]) / math.log(sizes[-1] / sizes[0])


PANELS = (
    Panel(
        axis="hosts", title="leader of many hosts", size="hosts",
        columns={"start_cpu_s": "CPU s until the start", "quiet_cpu_s_per_min": "CPU s of a quiet minute", "verdict_s": "s to the verdict"},
        before={"CPU s until the start, before": [(1000, 34.3)], "s to the verdict, before": [(1000, 54.0)]},
    ),
    Panel(
        axis="hosts", title="files and memory of the leader", size="hosts",
        columns={"fds": "open files", "rss_mib": "memory, MiB"},
        before={"open files, before": [(1000, 5006)], "memory, before": [(1000, 392)]},
    ),
    Panel(
        axis="hosts", title="the spec sent to all hosts", size="hosts", columns={"prepare_mb": "MB"},
        before={"before": [(64, 0.424), (1000, 28.5)]},
    ),
    Panel(
        axis="elastic", title="a host lost, and back", size="hosts",
        columns={"shrunk_cpu_s": "CPU s until the others go on", "grown_cpu_s": "CPU s until all go on", "rss_mib": "memory, MiB"},
    ),
    Panel(
        axis="back", title="half of the hosts lost, and back", size="hosts",
        columns={"grown_cpu_s": "CPU s until all go on", "rss_mib": "memory, MiB", "surveys": "plans of all hosts"},
        before={"CPU s, before": [(128, 2.84), (500, 26.9), (1000, 150.0)], "plans, before": [(128, 65), (500, 253), (1000, 516)]},
    ),
    Panel(
        axis="order", title="order of samples", size="samples",
        columns={"first_update_cpu_s": "first update, CPU s", "peak_mib": "memory, MiB"},
    ),
    Panel(
        axis="shards", title="small images in shards, one rank", size="images",
        columns={"open_cpu_s": "to open, CPU s", "rank_mib": "memory, MiB", "worker_own_mib": "a loader process's own, MiB",
            "first_update_cpu_s": "first update, CPU s"},
        before={"memory, before": [(10_000, 5.5), (100_000, 47.5), (1_000_000, 460.5)]},
    ),
    Panel(
        axis="boxes", title="COCO's boxes, one rank", size="boxes",
        columns={"open_cpu_s": "to open, CPU s", "rank_mib": "memory, MiB"},
        before={"memory, before": [(860_000, 306)]},
    ),
    Panel(
        axis="shared", title="200,000 boxes on ranks of a host", size="ranks",
        columns={"alone_mib": "each by itself, MiB", "shared_mib": "shared, MiB", "alone_cpu_s": "each, CPU s",
            "shared_cpu_s": "shared, CPU s"},
    ),
    Panel(
        axis="evaluation", title="scoring an evaluation", size="images",
        columns={"score_cpu_s": "CPU s", "peak_mib": "memory, MiB", "sent_mb": "predictions sent, MB"},
        before={"memory, before": [(500, 107), (5_000, 626), (50_000, 5_855)]},
    ),
    Panel(
        axis="checkpoint", title="a checkpoint of 100 arrays", size="parameters",
        columns={"save_cpu_s": "save, CPU s", "verify_cpu_s": "verify, CPU s", "load_cpu_s": "load, CPU s"},
    ),
    Panel(
        axis="update", title="an update of 10^6 parameters", size="arrays",
        columns={"ours_cpu_ms": "mtrain, CPU ms", "bare_cpu_ms": "bare loop, CPU ms"},
    ),
    Panel(
        axis="updates", title="records of a long run", size="updates",
        columns={"metrics_mb": "metrics.jsonl, MB", "report_html_mb": "report.html, MB", "report_cpu_s": "the report, CPU s",
            "report_peak_mib": "its memory, MiB"},
    ),
    Panel(
        axis="runs", title="the list of runs", size="runs",
        columns={"list_first_cpu_s": "first time, CPU s", "list_again_cpu_s": "again, CPU s", "kept_mib": "kept, MiB"},
        before={"again, before": [(100, 0.135), (1000, 1.14)], "kept, before": [(100, 61), (1000, 594)]},
    ),
    Panel(
        axis="day", title="a training of a day", size="updates",
        columns={"rank_rss_mib": "a rank, MiB", "leader_rss_mib": "its starter, MiB", "rank_files": "open files of a rank"},
    ),
)  # fmt: skip


def chosen(panel: Panel, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that differ in the size of the panel alone."""
    if panel.axis == "checkpoint":
        return [row for row in rows if row["arrays"] == 100]
    if panel.axis == "update":
        return [row for row in rows if row["parameters"] == 1_000_000]
    return list(rows)


def draw(measured: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draw all panels whose axis was measured at two sizes or more."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if len(chosen(panel, measured.get(panel.axis, ()))) > 1]
    across = 3
    down = -(-len(panels) // across)
    with rc_context({"svg.hashsalt": "mtrain", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(11.5, 3.1 * down), layout="constrained", facecolor="white")
        figure.suptitle(
            "How cost grows: both axes logarithmic, n to the given power", color=INK, fontsize=11, x=0.01, ha="left"
        )
        plots = figure.subplots(down, across, squeeze=False).ravel()
        for plot, panel in zip(plots, panels, strict=False):
            _draw_panel(plot, panel, chosen(panel, measured[panel.axis]))
        for plot in plots[len(panels) :]:
            plot.set_axis_off()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_panel(plot: Any, panel: Panel, rows: Sequence[Row]) -> None:
    for (key, name), colour in zip(panel.columns.items(), COLOURS, strict=False):
        points = [(row[panel.size], row[key]) for row in rows if isinstance(row.get(key), int | float) and row[key] > 0]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        power = exponent(x, y)
        label = name if math.isnan(power) else f"{name}: {power:.1f}".replace("-0.0", "0.0")
        plot.loglog(x, y, marker="o", markersize=3, color=colour, linewidth=1.4, label=label)
    for number, (name, points) in enumerate((panel.before or {}).items()):
        x, y = zip(*points, strict=True)
        plot.loglog(x, y, marker="x", linestyle=":", color=LIMIT, alpha=1 - 0.4 * number, label=name)
    plot.set_title(panel.title, loc="left", color=INK, fontsize=9)
    plot.set_xlabel(panel.size, color=INK)
    plot.grid(color=FAINT, linewidth=0.6)
    plot.spines[["top", "right"]].set_visible(False)
    low, high = plot.get_ylim()
    plot.set_ylim(low, high * (high / low) ** 0.55)  # room for the legend
    plot.legend(fontsize=6.5, frameon=False, loc="upper left")
