"""The result of pruning as lines for a person."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that ``mtrain prune`` prints: groups, before and after."""
    rows = [(row["group"], str(row["channels"][0]), str(row["channels"][1])) for row in report["groups"]]
    yield from _table([("group", "channels", "left"), *rows])
    yield ""
    yield from _table([("", "before", "after", "ratio"), *_before_and_after(report)])
    yield ""
    yield (
        f"float64: the smaller network differs from the masked one by at most {report['difference']:.3g} "
        f"(largest output {report['largest_output']:.3g})"
    )


def _before_and_after(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    flops, parameters, times = report["flops"], report["parameters"], report["latency_s"]
    yield "GFLOPs", f"{flops[0] / 1e9:.3f}", f"{flops[1] / 1e9:.3f}", _ratio(flops)
    yield "parameters", f"{parameters[0]:,}", f"{parameters[1]:,}", _ratio(parameters)
    label = f"ms for {report['samples_timed']} samples"
    yield label, f"{times[0] * 1e3:.1f}", f"{times[1] * 1e3:.1f}", _ratio(times)
    for name in report["headline"]:
        pair = [metrics.get(name) for metrics in report["metrics"]]
        if None not in pair:
            yield name, f"{pair[0]:.4f}", f"{pair[1]:.4f}", ""


def _ratio(pair: Sequence[float]) -> str:
    return f"{pair[1] / pair[0]:.3f}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([row[0].ljust(len(first)), *others]).rstrip()
