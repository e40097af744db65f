"""A skipped test fails the run, unless its reason is a fact of the machine that `skips.toml` lists.

A plugin of pytest, loaded by `conftest.py`. It is active with `--no-skips`, which the Makefile gives, and where the
environment says `CI=true`. There even a missing program of the system is no reason, since CI can install it.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("skips.toml")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help=f"a skip whose reason is not in {LIST.name} is a failure")


def pytest_configure(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if config.getoption("--no-skips") or in_ci:
        config.pluginmanager.register(SkipGate(allowed(in_ci=in_ci)), "mtrain-skips")


def allowed(*, in_ci: bool) -> dict[str, Sequence[str]]:
    """Regular expressions of the reasons that may skip a test, with Debian's packages that would let it run.

    Each has a `why` beside it for people.
    """
    entries = tomllib.loads(LIST.read_text(encoding="utf-8")).get("skip", [])
    bare = [entry for entry in entries if not entry.get("why")]
    assert not bare, f"{LIST}: no `why` beside {bare}"
    return {entry["reason"]: entry.get("packages", ()) for entry in entries if not in_ci or entry.get("in_ci", True)}


class SkipGate:
    """Collects the skips of a session, those of xdist's workers included, and fails it for the ones that are not listed.

    Tests that a missing package of Debian leaves out are named at the end.
    """

    def __init__(self, reasons: Mapping[str, Sequence[str]]) -> None:
        self._allowed = [(re.compile(reason), packages) for reason, packages in reasons.items()]
        self._refused: dict[str, str] = {}
        self._left_out: dict[str, Sequence[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._take(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._take(report)

    def _take(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            longrepr = report.longrepr
            reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
            found = [packages for pattern, packages in self._allowed if pattern.search(reason)]
            if not found:
                self._refused[report.nodeid] = reason
            elif found[0]:
                self._left_out[report.nodeid] = found[0]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.section("left out: they need packages of Debian", sep="=")
            for test, packages in sorted(self._left_out.items()):
                terminalreporter.line(f"{test}: {' '.join(packages)}")
        if self._refused:
            terminalreporter.section("skips that are not allowed here", sep="=", red=True)
            for test, reason in sorted(self._refused.items()):
                terminalreporter.line(f"{test}: {reason}")
            terminalreporter.line(f"make the test run, or give the reason in {LIST.name}")
