"""How cost grows: measure one axis at several sizes, print a table, and write the rows as JSON and a plot.

    python -m benchmarks.scale hosts [--sizes 4,64,1000] [--out scale]
    python -m benchmarks.scale order|boxes|update|checkpoint [--out scale]

``hosts`` runs the real leader with stand-in hosts (``growth/stand_in_hosts.py``); every other row is a process of its own.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth import hosts, parameters, samples

ROOT = Path(__file__).parents[1]
AXES: dict[str, tuple[str, Sequence[tuple[int, ...]], str]] = {
    "hosts": ("", [(size,) for size in hosts.SIZES], "hosts"),
    "order": ("samples", [(size,) for size in samples.ORDER_SIZES], "samples"),
    "boxes": ("samples", [(size,) for size in samples.BOX_SIZES], "boxes"),
    "update": ("parameters", parameters.UPDATE_SIZES, "arrays"),
    "checkpoint": ("parameters", parameters.CHECKPOINT_SIZES, "parameters"),
}
"""Axis -> module of ``benchmarks.growth``, sizes, and the key of a row that is the size."""


def measured(axis: str, size: Sequence[int]) -> dict[str, Any]:
    """Measure one row."""
    module = AXES[axis][0]
    if not module:
        row = hosts.measure(*size)
        return {key: value for key, value in row.items() if key not in ("console", "messages")}
    argv = [sys.executable, "-m", f"benchmarks.growth.{module}", axis, *map(str, size)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(argv, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout
    row = json.loads(printed.strip().splitlines()[-1])
    assert isinstance(row, dict)
    return row


def exponent(rows: Sequence[dict[str, Any]], size: str, key: str) -> float:
    """Return the exponent of growth between the smallest and the largest size; nan where it cannot be told."""
    first, last = rows[0], rows[-1]
    if min(first[key], last[key]) <= 0 or first[size] == last[size]:
        return math.nan
    return math.log(last[key] / first[key]) / math.log(last[size] / first[size])


def table(rows: Sequence[dict[str, Any]], size: str) -> str:
    """Return the rows as a table, with the exponent of each column."""
    keys = [size, *(key for key in rows[0] if key != size and all(key in row for row in rows))]
    lines = [
        keys,
        *([f"{row[key]:,.4g}" if isinstance(row[key], float) else f"{row[key]:,}" for key in keys] for row in rows),
    ]
    lines.append(["exponent", *(f"{exponent(rows, size, key):.2f}" for key in keys[1:])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def plot(rows: Sequence[dict[str, Any]], size: str, path: Path) -> None:
    """Draw every column over the size, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.add_subplot()
    for key in rows[0]:
        if key != size and all(isinstance(row.get(key), int | float) and row[key] > 0 for row in rows):
            axes.loglog([row[size] for row in rows], [row[key] for row in rows], marker="o", label=key)
    axes.set_xlabel(size)
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axis", choices=list(AXES))
    parser.add_argument("--sizes", help="of the first number of each row, separated by commas; default: all")
    parser.add_argument("--out", type=Path, help="folder for AXIS.json and AXIS.png")
    arguments = parser.parse_args()
    _, sizes, key = AXES[arguments.axis]
    if arguments.sizes:
        wanted = {int(each) for each in arguments.sizes.split(",")}
        known = {size[0] for size in sizes}
        sizes = [size for size in sizes if size[0] in wanted]
        if arguments.axis in ("hosts", "order", "boxes"):
            sizes = [*sizes, *((each,) for each in sorted(wanted - known))]
        if not sizes:
            parser.error(f"--sizes {arguments.sizes}: expected some of {', '.join(map(str, sorted(known)))}")
    rows = []
    for size in sizes:
        rows.append(measured(arguments.axis, size))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows, key))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{arguments.axis}.json").write_text(json.dumps(rows, indent=1))
        plot(rows, key, arguments.out / f"{arguments.axis}.png")


if __name__ == "__main__":
    main()
