"""``python -m tests.mutants``: plant each fault of the catalogue in a copy of the source, run its killers, print the
survivors.

The working tree is never touched. The killers must pass without a fault first: a test that fails anyway notices
nothing. Libraries are imported once, here; each run of pytest is a fork that imports mtrain and the tests anew, from
its copy.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.mutants.catalogue import CATALOGUE, ROOT, Fault, Stale, read

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs")
PRELOADED = (
    "numpy",
    "torch",
    "cv2",
    "pydantic",
    "yaml",
    "rich.console",
    "click",
    "PIL.Image",
    "safetensors.numpy",
    "_pytest.main",
)
LIMIT_S = 300.0
"""For the killers of one fault."""
MARKS = "not slow"
PLACES = ("", *(str(folder.relative_to(ROOT)) for folder in sorted(ROOT.glob("packages/*/src"))))
"""Folders of a checkout that Python imports from."""
NOTHING_COLLECTED = (4, 5)
"""Exit codes of pytest."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one fault."""

    fault: Fault
    outcome: str
    """killed, survived, no test, timed out, or stale."""
    seconds: float
    killer: str = ""


@dataclass(kw_only=True)
class Run:
    """A fork that runs pytest in a copy, and what to put back when it has ended."""

    fault: Fault
    copy: Path
    before: str
    pid: int
    began: float

    def end(self, code: int) -> Finding:
        """Put the source back, and tell."""
        (self.copy / self.fault.file).write_text(self.before, encoding="utf-8")
        _forget_bytecode(self.copy / self.fault.file)
        output = _output(self.copy).read_text(encoding="utf-8", errors="replace")
        failed = [line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return Finding(
            fault=self.fault,
            outcome=_outcome(code),
            seconds=time.monotonic() - self.began,
            killer=failed[0] if failed else "",
        )


def main() -> int:
    """Parse the command line, plant, print; returns 0 where every fault was noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="parts of ids, areas or rooms of the faults to plant, separated by commas"
    )
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE, help="another folder, or one file, of faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults at the same time")
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout whose source and tests are copied")
    parser.add_argument(
        "--marks", default=MARKS, help="which tests may notice; of `make test`: (not job or smoke) and not slow"
    )
    parser.add_argument("--no-baseline", action="store_true", help="do not run the killers without a fault first")
    arguments = parser.parse_args()
    words = arguments.only.split(",")
    faults = [
        fault
        for fault in read(arguments.catalogue)
        if any(word in name for word in words for name in (fault.id, fault.area, fault.room))
    ]
    os.environ.update(OMP_NUM_THREADS="1", MPLBACKEND="Agg", PYTEST_ADDOPTS=f"-m '{arguments.marks}'")
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [_copy(arguments.source, Path(folder) / str(i)) for i in range(arguments.jobs)]
        if not arguments.no_baseline and not _passes(copies[0], faults):
            return 1
        findings = _plant_all(faults, copies)
    print(_table(findings, time.monotonic() - began))
    return 0 if all(finding.outcome == "killed" or finding.fault.equivalent for finding in findings) else 1


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, ignore=NOT_COPIED, symlinks=True))


def _passes(copy: Path, faults: Sequence[Fault]) -> bool:
    """Return whether all killers pass on the unchanged source."""
    killers = sorted({killer for fault in faults for killer in _present(copy, fault.killers)})
    code = os.waitstatus_to_exitcode(os.waitpid(_forked_pytest(copy, killers), 0)[1])
    if code != 0:
        print(f"{_output(copy).read_text()}\nthese tests fail without any fault; mend them first", file=sys.stderr)
    return code == 0


def _plant_all(faults: Sequence[Fault], copies: Sequence[Path]) -> list[Finding]:
    left, free, running, findings = list(faults), list(copies), [], []
    while left or running:
        while left and free:
            copy = free.pop()
            started = _planted(left.pop(0), copy)
            if isinstance(started, Run):
                running.append(started)
            else:
                findings.append(started)
                free.append(copy)
        for run in list(running):
            code = _ended(run)
            if code is not None:
                running.remove(run)
                free.append(run.copy)
                finding = run.end(code)
                findings.append(finding)
                print(f"{finding.outcome:9} {finding.seconds:6.1f} s  {run.fault.id}  {finding.killer}", flush=True)
        time.sleep(0.05)
    return findings


def _planted(fault: Fault, copy: Path) -> Run | Finding:
    try:
        before = fault.apply(copy)
    except Stale as error:
        print(error, file=sys.stderr)
        return Finding(fault=fault, outcome="stale", seconds=0.0)
    _forget_bytecode(copy / fault.file)
    pid = _forked_pytest(copy, _present(copy, fault.killers))
    return Run(fault=fault, copy=copy, before=before, pid=pid, began=time.monotonic())


def _outcome(code: int) -> str:
    """Interpret an exit code; a run that did not end proves nothing, because a busy machine does the same."""
    if code in NOTHING_COLLECTED:
        return "no test"
    return "survived" if code == 0 else "timed out" if code == -signal.SIGKILL else "killed"


def _ended(run: Run) -> int | None:
    """Exit code of a run that has ended; negative where it was killed because its time was over."""
    if time.monotonic() > run.began + LIMIT_S:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    pid, status = os.waitpid(run.pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _forget_bytecode(file: Path) -> None:
    """Python takes bytecode for current whose source has the same size and the same second."""
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _present(copy: Path, killers: Sequence[str]) -> list[str]:
    """Those whose file, and function, are there: a checkout of before may lack some."""
    results = []
    for killer in killers:
        file, _, name = killer.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        path = copy / file
        if path.is_dir() or (path.is_file() and f"def {function}" in path.read_text(encoding="utf-8")):
            results.append(killer)
    return results


def _output(copy: Path) -> Path:
    return copy.with_suffix(".txt")


def _forked_pytest(copy: Path, tests: Sequence[str]) -> int:
    """Process id of a fork that runs ``tests`` in ``copy``."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = NOTHING_COLLECTED[0]
    try:
        os.setsid()
        output = os.open(_output(copy), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        places = [str(copy / place) for place in PLACES]
        os.environ["PYTHONPATH"] = os.pathsep.join(
            places
        )  # in front of what is installed, for processes that tests start
        sys.path[:] = [
            *places,
            *(path for path in sys.path if path not in ("", *(str(ROOT / place) for place in PLACES))),
        ]
        for name in [name for name in sys.modules if name == "tests" or name.startswith(("tests.", "mtrain"))]:
            del sys.modules[name]
        if tests:
            code = _pytest(tests)
    finally:
        os._exit(code)


def _pytest(tests: Sequence[str]) -> int:
    import pytest

    plugins = ["--disable-plugin-autoload", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    return int(pytest.main([*plugins, "-q", "-x", "-rfE", *tests]))


def _table(findings: Sequence[Finding], seconds: float) -> str:
    rooms = sorted({finding.fault.room for finding in findings})
    killed = Counter(finding.fault.room for finding in findings if finding.outcome == "killed")
    total = Counter(finding.fault.room for finding in findings if not finding.fault.equivalent)
    lines = ["", f"{'room':<22}{'noticed':>9}"]
    lines += [f"{room:<22}{killed[room]:>4} / {total[room]}" for room in rooms]
    lines += [f"{'all':<22}{sum(killed.values()):>4} / {sum(total.values())}   in {seconds / 60:.1f} minutes"]
    lines += [
        f"{finding.outcome}: {finding.fault.id} ({finding.fault.file}) {finding.fault.equivalent}".rstrip()
        for finding in findings
        if finding.outcome != "killed"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
