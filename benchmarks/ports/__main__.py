"""Measure the ports against their originals, and write the tables of examples/ports/README.md."""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.ports import jobs, lines
from benchmarks.ports.jobs import FOLDER, PORTS, JobError, Port

README = FOLDER / "README.md"
BEGIN, END = "<!-- begin: python -m benchmarks.ports -->", "<!-- end -->"
SIZES = (1, 2, 3)
Metrics = dict[str, dict[str, Any]]
"""Name of a port -> name of a cell -> its value, see ``cells``."""


def cells(port: Port) -> dict[str, Callable[[], Any]]:
    """Return what is measured of one port, by name: ``bits``, ``A 2``, ``peer 2``, ``B ddp 2`` and so on."""
    plain64 = cache(lambda: jobs.plain(port, "--fp64"))
    own_order = cache(lambda: jobs.ours(port, "solo", 1, own_order=True))

    def port_a(size: int) -> float:
        return jobs.difference(plain64(), jobs.ours(port, "solo" if size == 1 else port.backend, size))

    def peer(size: int) -> float:
        return jobs.difference(plain64(), jobs.peer(port, size, "--fp64"))

    def port_b(backend: str, size: int) -> float:
        return jobs.difference(own_order(), jobs.ours(port, backend, size, own_order=True))

    others = [backend for backend in port.backends if backend != "solo"]
    return {
        "bits": lambda: jobs.same_bits(jobs.plain(port), jobs.ours(port, "solo", 1, fp64=False)),
        **{f"A {size}": partial(port_a, size) for size in SIZES},
        **{f"peer {size}": partial(peer, size) for size in port.peer_ranks},
        **{f"B {backend} {size}": partial(port_b, backend, size) for backend in others for size in SIZES},
    }


def tried(what: str, run: Callable[[], Any]) -> Any:
    """Return what ``run`` measures, or the word ``failed``; print both."""
    began = time.perf_counter()
    try:
        value = run()
    except JobError as error:
        print(f"{what}: {error}", flush=True)
        value = "failed"
    print(f"{what}: {value} ({time.perf_counter() - began:.0f} s)", flush=True)
    return value


def tables(metrics: Metrics) -> str:
    """Return the tables of the README."""
    rows = [
        "| port | lines: mtrain | lines: peer | deleted | one rank | mtrain 1 / 2 / 3 ranks | peer 1 / 2 / 3 ranks |",
        "|---|--:|--:|--:|---|---|---|",
    ]
    ports = [port for port in PORTS if port.name in metrics]
    for port in ports:
        row = metrics[port.name]
        ours = lines.changes(port.folder / "plain.py", port.folder / "port.py")
        peer = lines.changes(port.folder / "plain.py", port.folder / "peer.py")
        bits = {True: "same bits", False: "**other bits**"}.get(row.get("bits"), "not measured")
        rows.append(
            f"| [{port.title}]({port.name}) | {ours.written} | {peer.written} | {ours.deleted} | {bits} | "
            f"{_by_size(row, 'A')} | {_by_size(row, 'peer')} |"
        )
    names = list(dict.fromkeys(backend for port in PORTS for backend in port.backends if backend != "solo"))
    rows += ["", f"| port | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for port in ports:
        row = metrics[port.name]
        rows.append(f"| {port.title} | {' | '.join(_by_size(row, f'B {name}') for name in names)} |")
    return "\n".join(rows)


def _by_size(row: Mapping[str, Any], what: str) -> str:
    values = [row.get(f"{what} {size}") for size in SIZES]
    return "" if values == [None] * len(SIZES) else " / ".join(map(_cell, values))


def _cell(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else "0" if value == 0 else f"{value:.0e}"


def main() -> int:
    """Measure the named ports. Metrics that are in the file already, of a call that was interrupted, are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="folders of examples/ports; none: all")
    parser.add_argument("--json", type=Path, default=Path("build/ports.json"), help="the metrics; kept where it exists")
    parser.add_argument("--readme", action="store_true", help="write the tables into examples/ports/README.md")
    parser.add_argument("--dry", action="store_true", help="measure nothing, show the metrics of the file")
    flags = parser.parse_args()
    metrics: Metrics = json.loads(flags.json.read_text()) if flags.json.exists() else {}
    flags.json.parent.mkdir(parents=True, exist_ok=True)
    for name in [] if flags.dry else flags.names or [port.name for port in PORTS]:
        row = metrics.setdefault(name, {})
        for cell, run in cells(jobs.by_name(name)).items():
            if cell not in row:
                row[cell] = tried(f"{name} {cell}", run)
                flags.json.write_text(json.dumps(metrics, indent=1))
    text = tables(metrics)
    print(text)
    if flags.readme:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
