"""Measure the ports against their originals, and write the tables of examples/ports/README.md."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.ports import jobs, lines
from benchmarks.ports.jobs import FOLDER, PORTS, JobError, Port, Weights

README = FOLDER / "README.md"
BEGIN, END = "<!-- begin: python -m benchmarks.ports -->", "<!-- end -->"
SIZES = (1, 2, 3)


def measured(port: Port) -> dict[str, Any]:
    """Run everything of one port, and return its figures; the value of what failed is None."""
    plain32, plain64 = jobs.plain(port), jobs.plain(port, "--fp64")
    own: Weights = jobs.ours(port, "solo", 1, own_order=True)
    return {
        "peer_lines": lines.changes(port.folder / "plain.py", port.folder / "peer.py").written,
        "port_lines": lines.changes(port.folder / "plain.py", port.folder / "port.py").written,
        "deleted_lines": lines.changes(port.folder / "plain.py", port.folder / "port.py").deleted,
        "same_bits": _tried(f"{port.name} A", lambda: jobs.same_bits(plain32, jobs.ours(port, "solo", 1, fp64=False))),
        "A": {
            size: _tried(f"{port.name} A {size}", lambda size=size: jobs.difference(plain64, _port_a(port, size)))
            for size in SIZES
        },
        "peer": {
            size: _tried(
                f"{port.name} peer {size}",
                lambda size=size: jobs.difference(plain64, jobs.peer(port, size, "--fp64")),
            )
            for size in port.peer_ranks
        },
        "B": {
            backend: {
                size: _tried(
                    f"{port.name} B {backend} {size}",
                    lambda backend=backend, size=size: jobs.difference(
                        own, jobs.ours(port, backend, size, own_order=True)
                    ),
                )
                for size in SIZES
            }
            for backend in port.backends
            if backend != "solo"
        },
    }


def _port_a(port: Port, size: int) -> Weights:
    return jobs.ours(port, "solo" if size == 1 else port.backend, size)


def _tried(what: str, run: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    try:
        value = run()
    except JobError as error:
        print(f"{what}: {error}", flush=True)
        value = None
    print(f"{what}: {value} ({time.perf_counter() - began:.0f} s)", flush=True)
    return value


def tables(figures: dict[str, Any]) -> str:
    """Return the tables of the README."""
    rows = [
        "| port | lines: mtrain | lines: peer | deleted | one rank | mtrain 1 / 2 / 3 ranks | peer 1 / 2 / 3 ranks |",
        "|---|--:|--:|--:|---|---|---|",
    ]
    ports = [port for port in PORTS if port.name in figures]
    for port in ports:
        row = figures[port.name]
        bits = {True: "same bits", False: "**other bits**", None: "failed"}[row["same_bits"]]
        rows.append(
            f"| [{port.title}]({port.name}) | {row['port_lines']} | {row['peer_lines']} | {row['deleted_lines']} | {bits} | "
            f"{_cells(row['A'])} | {_cells(row['peer'])} |"
        )
    names = list(dict.fromkeys(backend for port in PORTS for backend in port.backends if backend != "solo"))
    rows += ["", f"| port | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for port in ports:
        cells = [_cells(figures[port.name]["B"][name]) if name in port.backends else "" for name in names]
        rows.append(f"| {port.title} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cells(differences: dict[Any, float | None]) -> str:
    by_size = {int(size): value for size, value in differences.items()}
    return " / ".join(_cell(by_size[size]) if size in by_size else "-" for size in SIZES)


def _cell(value: float | None) -> str:
    return "failed" if value is None else "0" if value == 0 else f"{value:.0e}"


def main() -> int:
    """Measure the named ports, and join them with the figures that the file has already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="folders of examples/ports; none: all")
    parser.add_argument("--json", type=Path, default=Path("build/ports.json"), help="figures of earlier calls, and now")
    parser.add_argument("--readme", action="store_true", help="write the tables into examples/ports/README.md")
    flags = parser.parse_args()
    figures: dict[str, Any] = json.loads(flags.json.read_text()) if flags.json.exists() else {}
    for name in flags.names or [port.name for port in PORTS]:
        figures[name] = measured(jobs.by_name(name))
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(figures, indent=1))
    text = tables(figures)
    print(text)
    if flags.readme:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
