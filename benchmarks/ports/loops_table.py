"""Measure the loops of examples/ports on the backends: `python -m benchmarks.ports.loops_table --readme` writes the tables.

A call that was interrupted goes on where it ended: the metrics are in ``build/loops.json``.
"""

import argparse
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ports import lines, loops
from benchmarks.ports.__main__ import README
from benchmarks.ports.jobs import JobError, Weights
from benchmarks.ports.loops import SCRIPTS, Script
from mtrain.core.state.digest import digest

BEGIN, END = "<!-- begin: python -m benchmarks.ports.loops_table -->", "<!-- end: loops -->"
JOBS = (
    ("solo", 1),
    ("ddp", 2),
    ("ddp", 3),
    ("horovod", 2),
    ("horovod", 3),
    ("ZeRO 1", 2),
    ("ZeRO 3", 2),
    ("fsdp", 2),
    ("fleet", 2),
)
Metrics = dict[str, dict[str, Any]]
"""Name of a script -> name of a cell -> its value, see ``cells``."""


def cells(script: Script, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what is measured of one script, by name: ``solo 1``, ``ddp 2``, ``killed``, ``fabric 2`` and so on.

    The weights of the plain script are kept in ``folder`` between calls.
    """

    def plain() -> Weights:
        text = b"".join((script.folder / name).read_bytes() for name in ("common.py", "plain.py"))
        file = folder / f"{script.name}-{hashlib.sha256(text).hexdigest()[:12]}.npz"
        if not file.exists():
            np.savez(file, **loops.plain(script, "--fp64"))
        with np.load(file) as arrays:
            return dict(arrays)

    def trained(backend: str, size: int) -> dict[str, Any]:
        weights = loops.ours(script, backend, size)
        return {"difference": loops.between(plain(), weights), "digest": digest(weights)}

    def killed() -> dict[str, Any]:
        updates, weights = loops.killed(script, "ddp", 2)
        return {"after": updates, "digest": digest(weights)}

    def peer(library: str, size: int) -> dict[str, Any]:
        return {"difference": loops.between(plain(), loops.peer(script, library, size, "--fp64"))}

    return {
        **{f"{backend} {size}": partial(trained, backend, size) for backend, size in JOBS},
        "killed": killed,
        **{f"{library} {size}": partial(peer, library, size) for library in script.peers for size in (1, 2)},
    }


def tried(what: str, run: Callable[[], Any]) -> Any:
    """Return what ``run`` measures, or the sentence with which the job was refused; print both."""
    began = time.perf_counter()
    try:
        value = run()
    except JobError as error:
        value = {"refused": sentence(str(error))}
    print(f"{what}: {value} ({time.perf_counter() - began:.0f} s)", flush=True)
    return value


def sentence(words: str) -> str:
    """Return the sentence in the last words of a job that says why it failed."""
    found = [line.partition("error: ")[2] for line in words.splitlines() if line.startswith("error: ")]
    return found[-1] if found else words.strip().splitlines()[-1]


def tables(metrics: Metrics) -> str:
    """Return the tables of the README, and the refusals under them."""
    refusals: list[str] = []
    columns = list(dict.fromkeys(backend for backend, _ in JOBS))
    rows = [f"| loop | {' | '.join(columns)} | killed and resumed |", "|---|" + "---|" * (len(columns) + 1)]
    for script in (script for script in SCRIPTS if script.name in metrics):
        row = metrics[script.name]
        by_backend = [
            " / ".join(_cell(row.get(f"{backend} {size}"), refusals) for backend, size in JOBS if backend == column)
            for column in columns
            for backend in [column]
        ]
        rows.append(f"| [{script.title}]({script.name}) | {' | '.join(by_backend)} | {_killed(row, refusals)} |")
    rows += ["", *(f"{number}. {words}" for number, words in enumerate(refusals, 1))]
    libraries = ("fabric", "accelerate")
    rows += [
        "",
        "| loop | lines: mtrain | lines: Fabric | lines: Accelerate | deleted by mtrain |",
        "|---|--:|--:|--:|--:|",
    ]
    for script in SCRIPTS:
        ours = changed(script, "port")
        peers = [str(changed(script, f"peer_{one}").written) if one in script.peers else "" for one in libraries]
        rows.append(f"| {script.title} | {ours.written} | {' | '.join(peers)} | {ours.deleted} |")
    return "\n".join(rows)


def changed(script: Script, form: str) -> lines.Changes:
    """Return by how many lines a form of a script differs from its plain one."""
    return lines.changes(script.folder / "plain.py", script.folder / f"{form}.py")


def _cell(value: Mapping[str, Any] | None, refusals: list[str]) -> str:
    if value is None:
        return "-"
    if "refused" in value:
        words = re.sub(r"rank \d+[^:]*: |common\.", "", value["refused"])
        words = re.sub(r"the model is a [\w.]+", "the model is a module of torch", words)
        if words not in refusals:
            refusals.append(words)
        return f"({refusals.index(words) + 1})"
    return "0" if value["difference"] == 0 else f"{value['difference']:.0e}"


def _killed(row: Mapping[str, Any], refusals: list[str]) -> str:
    value, whole = row.get("killed"), row.get("ddp 2", {})
    if value is None or "refused" in value:
        return _cell(value, refusals)
    return "same bits" if value["digest"] == whole.get("digest") else "**other bits**"


def main() -> int:
    """Measure the named loops. Metrics that are in the file already are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="folders of examples/ports; none: all loops")
    parser.add_argument("--json", type=Path, default=Path("build/loops.json"), help="the metrics; kept where it exists")
    parser.add_argument("--only", metavar="CELL", action="append", help="measure these cells alone, such as 'ddp 2'")
    parser.add_argument("--readme", action="store_true", help="write the tables into examples/ports/README.md")
    parser.add_argument("--dry", action="store_true", help="measure nothing, show the metrics of the file")
    flags = parser.parse_args()
    flags.json.parent.mkdir(parents=True, exist_ok=True)
    for name in [] if flags.dry else flags.names or [script.name for script in SCRIPTS]:
        for cell, run in cells(loops.by_name(name), flags.json.parent).items():
            metrics = _read(flags.json)
            if cell not in metrics.get(name, {}) and (not flags.only or cell in flags.only):
                value = tried(f"{name} {cell}", run)
                metrics = _read(flags.json)
                metrics.setdefault(name, {})[cell] = value
                flags.json.write_text(json.dumps(metrics, indent=1))
    text = tables(_read(flags.json))
    print(text)
    if flags.readme:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


def _read(file: Path) -> Metrics:
    return json.loads(file.read_text()) if file.exists() else {}


if __name__ == "__main__":
    raise SystemExit(main())
