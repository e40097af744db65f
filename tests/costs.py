"""What tests cost in CPU seconds: their own, those of the processes that they start, and those of collecting.

A plugin of pytest, loaded by `conftest.py`, that prints the sum at the end of each run. With `--costs FILE` it adds them to that
file as a line of JSON; `python -m tests.costs FILE` prints the sum of all its lines, and the tests that cost most.
"""

import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

MOST = 20
"""Number of tests that are listed."""
KEY = "costs"
"""Of what a worker of xdist hands over."""

Costs = Mapping[str, Sequence[float]]
"""Test -> its own seconds, those of its processes, number of processes that it started."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="add what this run costs to FILE, as a line of JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CostMeter(config), "mtrain-costs")


def _used() -> tuple[float, float]:
    """CPU seconds of this process, and of the processes below it: those that have been waited for, and warm ones that live."""
    own, below = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, below.ru_utime + below.ru_stime + _used_by_living()


def _used_by_living() -> float:
    """CPU seconds of the children that live, and of those that they have waited for; 0 without Linux's ``/proc``."""
    ticks = 0
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


class CostMeter:
    """Measures the tests that this process runs, and gathers what workers have measured."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collected: float | None = None
        """Seconds that this process had used when it began to run tests; None: it runs none."""
        self._tests: dict[str, Sequence[float]] = {}
        self._sum: Counter[str] = Counter()

    @property
    def _starts(self) -> int:
        gate: Any = self._config.pluginmanager.get_plugin("mtrain-starts")
        return gate.count if gate else 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = (*_used(), self._starts)
        if self._collected is None:
            self._collected = before[0]
        answer = yield
        after = (*_used(), self._starts)
        self._tests[item.nodeid] = [round(now - then, 3) for now, then in zip(after, before, strict=True)]
        return answer

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        own, below = _used()
        collection = own if self._collected is None else self._collected
        # What workers have used they say themselves; to the process that started them they are processes below it.
        has_workers = self._config.pluginmanager.hasplugin("dsession")
        self._sum.update(tests=own - collection, processes=0 if has_workers else below, collection=collection)
        self._sum.update(starts=self._starts - (self._config.option.numprocesses or 0 if has_workers else 0))
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[KEY] = (dict(self._sum), self._tests)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker has measured; one that died has said nothing."""
        figures, tests = getattr(node, "workeroutput", {}).get(KEY, ({}, {}))
        self._sum.update(figures)
        self._tests |= tests

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if hasattr(self._config, "workeroutput"):
            return
        terminalreporter.line(sum_of([self._sum]))
        if path := self._config.getoption("--costs"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"sum": self._sum, "tests": self._tests}) + "\n")


def sum_of(sums: Iterable[Mapping[str, float]]) -> str:
    """Return the line that tells what runs have cost."""
    total: Counter[str] = Counter()
    for each in sums:
        total.update(each)
    seconds = total["tests"] + total["processes"] + total["collection"]
    return (
        f"CPU seconds: {seconds:.0f} (tests {total['tests']:.0f}, their processes {total['processes']:.0f}, "
        f"collection {total['collection']:.0f}); starts of processes: {total['starts']:.0f}"
    )


def most_of(tests: Costs) -> list[str]:
    """Return a line for each of the tests that cost most."""
    costs = sorted(((own + below, starts, test) for test, (own, below, starts) in tests.items()), reverse=True)
    return [f"{seconds:7.1f} s {starts:4.0f} starts  {test}" for seconds, starts, test in costs[:MOST]]


def main(argv: Sequence[str]) -> int:
    """Print the sum of the runs of a file."""
    if len(argv) != 1 or not Path(argv[0]).is_file():
        print("usage: python -m tests.costs FILE, which `pytest --costs FILE` has written", file=sys.stderr)
        return 2
    runs = [json.loads(line) for line in Path(argv[0]).read_text(encoding="utf-8").splitlines()]
    tests = {
        f"{test} (run {number})": costs for number, run in enumerate(runs, 1) for test, costs in run["tests"].items()
    }
    print("the tests that cost most, in CPU seconds:", *most_of(tests), sep="\n")
    print(f"{len(tests)} tests in {len(runs)} runs")
    print(sum_of(run["sum"] for run in runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
