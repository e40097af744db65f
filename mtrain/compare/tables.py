"""Format the metrics of a comparison as text, for terminal and page."""

from collections.abc import Sequence

from mtrain.compare.results import BackendRow, Comparison
from mtrain.compare.traces import WORDS, ordinal
from mtrain.records.wording import duration
from mtrain_trace.differences import GRADIENT, LOSS, MOMENTS, WEIGHTS
from mtrain_trace.reading import AVERAGE

Table = tuple[Sequence[str], list[list[str]]]
"""Column names, and rows of cells."""
UNKNOWN = "not measured"


def agreement(result: Comparison) -> Table:
    """Tabulate the verdicts and the largest relative differences from the reference: of loss and norm over all updates,
    of other quantities in the last checkpoints."""
    columns = [
        "backend",
        "verdict",
        "differs first",
        "loss",
        "norm",
        "weights",
        "average",
        "moments",
        "norm off float64",
        "repeats itself",
    ]
    return columns, [
        [row.label, result.verdict(row), *_differences(row, result), _distance(row, result), _repeats(row)]
        for row in result.rows
    ]


def _distance(row: BackendRow, result: Comparison) -> str:
    return _size(result.distances.get(row.label, {}).get(GRADIENT))


def _differences(row: BackendRow, result: Comparison) -> list[str]:
    if row.label not in result.against:
        return [""] * 6
    against = result.against[row.label]
    gap = against.difference
    first = "never" if gap.first is None else f"{ordinal(gap.first)}: {WORDS[gap.what[0]]}"
    quantities = (LOSS, GRADIENT, WEIGHTS, AVERAGE, MOMENTS)
    return [first, *(_size(gap.gaps[name].largest if name in gap.gaps else None) for name in quantities)]


def _size(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def _repeats(row: BackendRow) -> str:
    return {True: "yes", False: "NO", None: "-"}[row.repeats]


def speeds(result: Comparison) -> Table:
    """Tabulate the speeds of the timed jobs."""
    columns = [
        "backend",
        "ranks",
        "ms / update",
        "quartiles",
        "samples/s",
        "data wait",
        "exchange wait",
        "sent / update",
        "peak memory of a rank",
        "start-up",
    ]
    return columns, [[row.label, *_speed_cells(row)] for row in result.rows if row.speed is not None]


def _speed_cells(row: BackendRow) -> list[str]:
    speed = row.speed
    assert speed is not None
    low, median, high = speed.quartiles_ms
    return [
        str(row.ranks),
        f"{median:.0f}",
        f"{low:.0f} to {high:.0f}",
        f"{speed.samples_per_s:.1f}",
        f"{100 * speed.wait_share:.0f}%",
        _shares(speed.communication_shares),
        UNKNOWN if speed.sent_bytes is None else size(speed.sent_bytes),
        size(max(speed.memory_bytes, default=0.0)),
        # Below a minute with a tenth, since start-ups of seconds are what backends differ in.
        duration(speed.startup_s) if speed.startup_s >= 60 else f"{speed.startup_s:.1f} s",
    ]


def _shares(values: Sequence[float]) -> str:
    """Format one value per job: a single number if all ranks agree, otherwise ``min to max``."""
    if not values:
        return UNKNOWN
    low, high = (f"{100 * value:.0f}%" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
