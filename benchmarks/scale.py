"""How cost grows: measure one axis at several sizes, print a table, and write the rows as JSON and a plot.

    python -m benchmarks.scale hosts [--sizes 4,64,1000] [--out scale]
    python -m benchmarks.scale elastic|back|ssh|slurm|order|boxes|shared|evaluation [--out scale]
    python -m benchmarks.scale update|checkpoint|updates|runs|logs|day [--out scale]
    python -m benchmarks.scale picture [--out scale]
    python -m benchmarks.scale all --out scale

``hosts``, ``elastic``, ``back`` and ``ssh`` run the real leader with stand-in hosts (``growth/stand_in_hosts.py``), ``slurm`` on a real
Slurm of namespaces (``growth/slurm_nodes.py``); every other row is a process of
its own. ``--out`` names the folder in which each axis has its rows as AXIS.json. ``picture`` draws the rows of that folder, by
default those in ``docs/images/how-cost-grows.json``, as ``docs/images/how-cost-grows.svg``, and keeps them there. ``all`` measures every
axis and draws them; an axis that cannot be measured on this machine keeps the rows that the page has.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.growth import (
    day,
    evaluation,
    hosts,
    logs,
    parameters,
    picture,
    records,
    samples,
    slurm_nodes,
)

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "images" / "how-cost-grows"
"""The picture of the page, and its rows, without their suffixes."""
AXES: dict[str, tuple[str, Sequence[tuple[int, ...]], str]] = {
    "hosts": ("", [(size,) for size in hosts.SIZES], "hosts"),
    "elastic": ("", [(size,) for size in hosts.ELASTIC_SIZES], "hosts"),
    "back": ("", [(size,) for size in hosts.BACK_SIZES], "hosts"),
    "ssh": ("", [(size,) for size in hosts.SSH_SIZES], "hosts"),
    "slurm": ("slurm_nodes", [(size,) for size in slurm_nodes.SIZES], "nodes"),
    "order": ("samples", [(size,) for size in samples.ORDER_SIZES], "samples"),
    "boxes": ("samples", [(size,) for size in samples.BOX_SIZES], "boxes"),
    "shared": ("samples", samples.SHARED_SIZES, "ranks"),
    "evaluation": ("evaluation", [(size,) for size in evaluation.IMAGE_SIZES], "images"),
    "updates": ("records", [(size,) for size in records.UPDATE_SIZES], "updates"),
    "runs": ("records", [(size,) for size in records.RUN_SIZES], "runs"),
    "logs": ("logs", [(size,) for size in logs.SIZES], "printed_mb"),
    "day": ("day", [(size,) for size in day.SIZES], "updates"),
    "update": ("parameters", parameters.UPDATE_SIZES, "arrays"),
    "checkpoint": ("parameters", parameters.CHECKPOINT_SIZES, "parameters"),
}
"""Axis -> module of ``benchmarks.growth``, sizes, and the key of a row that is the size."""


def measured(axis: str, size: Sequence[int]) -> dict[str, Any]:
    """Measure one row."""
    module = AXES[axis][0]
    if axis == "ssh":
        return hosts.measure_ssh(*size)
    if not module:
        elastic = axis in ("elastic", "back")
        lose = size[0] // 2 if axis == "back" else 1
        row = hosts.measure(*size, elastic=elastic, quiet_s=2.0 if elastic else 20.0, lose=lose)
        row["prepare_mb"] = row.get("messages", {}).get("received", {}).get("prepare", [0, 0])[1] / 1e6
        return {
            key: value
            for key, value in row.items()
            if key not in ("console", "messages", "rss_mib_over_time", "connections")
        }
    argv = [sys.executable, "-m", f"benchmarks.growth.{module}", axis, *map(str, size)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(argv, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout
    row = json.loads(printed.strip().splitlines()[-1])
    assert isinstance(row, dict)
    return row


def table(rows: Sequence[dict[str, Any]], size: str) -> str:
    """Return the rows as a table, with the exponent of each column."""
    keys = [size, *(key for key in rows[0] if key != size and all(key in row for row in rows))]
    lines = [
        keys,
        *([f"{row[key]:,.4g}" if isinstance(row[key], float) else f"{row[key]:,}" for key in keys] for row in rows),
    ]
    sizes = [row[size] for row in rows]
    numbers = ([row[key] for row in rows] for key in keys[1:])
    lines.append(["exponent", *(f"{picture.exponent(sizes, values):.2f}" for values in numbers)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def draw_picture(folder: Path | None) -> None:
    """Draw the rows of ``folder``, where it has them, and else those that the page has; keep them for the page."""
    kept = KEPT.with_suffix(".json")
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for axis in AXES:
        if folder is not None and (folder / f"{axis}.json").exists():
            rows[axis] = json.loads((folder / f"{axis}.json").read_text())
    kept.write_text(json.dumps(rows, indent=1) + "\n")
    picture.draw(rows, KEPT.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axis", choices=[*AXES, "picture", "all"])
    parser.add_argument("--sizes", help="of the first number of each row, separated by commas; default: all")
    parser.add_argument("--out", type=lambda path: Path(path).resolve(), help="folder for AXIS.json")
    arguments = parser.parse_args()
    if arguments.axis == "all":
        given = [f"--sizes={arguments.sizes}"] * bool(arguments.sizes) + [f"--out={arguments.out}"] * bool(
            arguments.out
        )
        for axis in AXES:
            print(axis, flush=True)
            if subprocess.run(
                [sys.executable, "-m", "benchmarks.scale", axis, *given], cwd=ROOT, check=False
            ).returncode:
                print(f"{axis}: not measured", flush=True)
    if arguments.axis in ("all", "picture"):
        draw_picture(arguments.out)
        return
    _, sizes, key = AXES[arguments.axis]
    if arguments.sizes:
        wanted = {int(each) for each in arguments.sizes.split(",")}
        known = {size[0] for size in sizes}
        sizes = [size for size in sizes if size[0] in wanted]
        if arguments.axis not in ("update", "checkpoint", "shared"):
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


if __name__ == "__main__":
    main()
