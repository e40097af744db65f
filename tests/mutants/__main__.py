"""``python -m tests.mutants``: plant each fault of the catalogue in a copy of the source, run its killers, print the survivors.

The working tree is never touched. The killers must pass without a fault first: a test that fails anyway notices nothing.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import ROOT, Fault, Stale, read

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs")
TIME_LIMIT_S = 300.0
"""For the killers of one fault; a fault that makes them hang is noticed."""
FAILED, NOTHING_COLLECTED = 1, (4, 5)
"""Exit codes of pytest."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of one fault."""

    fault: Fault
    outcome: str
    """killed, survived, no test, or stale."""
    seconds: float
    killer: str = ""


def main() -> int:
    """Parse the command line, plant, print; returns 0 where every fault was noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the id or area of the faults to plant")
    parser.add_argument("--jobs", type=int, default=2, help="faults at the same time")
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout whose source and tests are copied")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the killers without a fault first")
    given = parser.parse_args()
    faults = [fault for fault in read() if given.only in fault.id or given.only in fault.area]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [_copy(given.source, Path(folder) / str(i)) for i in range(given.jobs)]
        if not given.no_baseline and not _passes(copies[0], faults):
            return 1
        findings = _plant_all(faults, copies)
    print(_table(findings, time.monotonic() - began))
    return 0 if all(finding.outcome == "killed" or finding.fault.equivalent for finding in findings) else 1


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=NOT_COPIED, symlinks=True))


def _passes(copy: Path, faults: Sequence[Fault]) -> bool:
    """Whether all killers pass as the source is."""
    killers = sorted({killer for fault in faults for killer in _present(copy, fault.killers)})
    code, output = _pytest(copy, killers, limit_s=TIME_LIMIT_S * 10)
    if code != 0:
        print(f"{output}\nthese tests fail without any fault; mend them first", file=sys.stderr)
    return code == 0


def _plant_all(faults: Sequence[Fault], copies: Sequence[Path]) -> list[Finding]:
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def plant(fault: Fault) -> Finding:
        copy = free.get()
        try:
            finding = _plant(fault, copy)
        finally:
            free.put(copy)
        print(f"{finding.outcome:9} {finding.seconds:6.1f} s  {fault.id}  {finding.killer}", flush=True)
        return finding

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(plant, faults))


def _plant(fault: Fault, copy: Path) -> Finding:
    began = time.monotonic()
    try:
        before = fault.apply(copy)
    except Stale as error:
        print(error, file=sys.stderr)
        return Finding(fault=fault, outcome="stale", seconds=0.0)
    try:
        _forget_bytecode(copy / fault.file)
        killers = _present(copy, fault.killers)
        code, output = _pytest(copy, killers, limit_s=TIME_LIMIT_S) if killers else (NOTHING_COLLECTED[0], "")
    finally:
        (copy / fault.file).write_text(before, encoding="utf-8")
        _forget_bytecode(copy / fault.file)
    outcome = "survived" if code == 0 else "no test" if code in NOTHING_COLLECTED else "killed"
    failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return Finding(
        fault=fault,
        outcome=outcome,
        seconds=time.monotonic() - began,
        killer=failed[0] if failed else "hangs" if code < 0 else "",
    )


def _forget_bytecode(file: Path) -> None:
    """Python takes bytecode for current whose source has the same size and the same second."""
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _present(copy: Path, killers: Sequence[str]) -> list[str]:
    """Those whose file, and function, are there: a checkout of before may lack some."""
    found = []
    for killer in killers:
        file, _, name = killer.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        path = copy / file
        if path.is_dir() or (path.is_file() and f"def {function}" in path.read_text(encoding="utf-8")):
            found.append(killer)
    return found


def _pytest(copy: Path, tests: Sequence[str], *, limit_s: float) -> tuple[int, str]:
    """Exit code, and output; a negative code where the time was over."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "-rfE", *tests]
    try:
        done = subprocess.run(
            argv, cwd=copy, env=_environment(os.environ, copy), capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout + done.stderr


def _environment(environ: Mapping[str, str], copy: Path) -> dict[str, str]:
    """The copy comes before what is installed."""
    own = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    return {**environ, **own}


def _table(findings: Sequence[Finding], seconds: float) -> str:
    areas = dict.fromkeys(finding.fault.area for finding in findings)
    killed = Counter(finding.fault.area for finding in findings if finding.outcome == "killed")
    total = Counter(finding.fault.area for finding in findings if not finding.fault.equivalent)
    lines = ["", f"{'area':<22}{'noticed':>9}"]
    lines += [f"{area:<22}{killed[area]:>4} / {total[area]}" for area in areas]
    lines += [f"{'all':<22}{sum(killed.values()):>4} / {sum(total.values())}   in {seconds / 60:.1f} minutes"]
    lines += [
        f"{finding.outcome}: {finding.fault.id} ({finding.fault.file}) {finding.fault.equivalent}".rstrip()
        for finding in findings
        if finding.outcome != "killed"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
