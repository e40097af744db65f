"""A test that starts a process says so: it is marked `job`, or it uses a fixture that `starts_processes`.

A plugin of pytest, loaded by `conftest.py`. Any other start is refused and fails its test, so a run without jobs costs what
it seems to cost. Tests that are `slow` may start what they want, since no quick run has them. A copy (fork) counts as a start;
what a started process starts in turn is not seen.
"""

import multiprocessing
import multiprocessing.process
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., Any])
OF_MULTIPROCESSING, OF_A_COPY = "multiprocessing.start", "tests.warm.start"
"""Audit events that are raised here: for a process that a fork server makes, and for a copy of a warm process."""
EVENTS = frozenset(
    {
        "subprocess.Popen",
        "os.system",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.exec",
        OF_MULTIPROCESSING,
        OF_A_COPY,
    }
)
"""Audit events of starts."""
BY_ANY_TEST = frozenset({"ldconfig", "gcc", "ld", "objdump", "uname", "cc"})
"""Programs that whichever test comes first runs: libraries while they are imported, and mtrain to compile its kernels."""
HOW_TO = (
    "Mark a test that has to start one with @pytest.mark.job, or the fixture that does with @starts_processes below its "
    "@pytest.fixture (tests/starts.py says more); rather, test the same in this process."
)


def starts_processes(fixture: F) -> F:
    """Declare, below `pytest.fixture`, that a fixture starts processes: every test that uses it is a `job`."""
    fixture.starts_processes = True  # type: ignore[attr-defined]
    return fixture


_allowances: list[None] = []
"""One for each `allowed` that holds."""


@contextmanager
def allowed() -> Iterator[None]:
    """Let any test start a process that serves all later ones too."""
    _allowances.append(None)
    try:
        yield
    finally:
        _allowances.pop()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(StartGate(), "mtrain-starts")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        if any(hasattr(found.func, "starts_processes") for defined in fixtures.values() for found in defined):
            item.add_marker(pytest.mark.job)


class StartGate:
    """Counts the starts of each test of this process, and refuses those of tests that are no jobs."""

    def __init__(self) -> None:
        self.count = 0
        """Starts so far, those outside of tests included."""
        self._pid = os.getpid()
        self._item: pytest.Item | None = None
        self._is_job = True
        self._refused: list[str] = []
        self._is_over = False
        sys.addaudithook(self._see)
        _announce_multiprocessing()

    def pytest_unconfigure(self) -> None:
        self._is_over = True  # a hook cannot be taken away

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._is_job = any(item.get_closest_marker(name) for name in ("job", "slow"))
        self._refused.clear()
        try:
            return (yield)
        finally:
            self._is_job = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Fail the test also where the code under test has taken the refusal for an error of its own."""
        report = yield
        if self._refused and not report.failed:
            report.outcome, report.longrepr = "failed", "\n".join(self._refused)
        self._refused.clear()
        return report

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_over or event not in EVENTS or os.getpid() != self._pid:
            return
        command = _command(event, arguments)
        if os.path.basename(command.partition(" ")[0]) in BY_ANY_TEST:
            return
        self.count += 1
        if not self._is_job and not _allowances:
            self._refused.append(f"this test starts a process and is no `job`: {command[:300]}\n{HOW_TO}")
            pytest.fail(self._refused[-1], pytrace=True)


def _command(event: str, arguments: tuple[Any, ...]) -> str:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", OF_A_COPY):
        words = arguments[0 if event == OF_A_COPY else 1]
        return " ".join(map(os.fsdecode, [words] if isinstance(words, str | bytes | os.PathLike) else words))
    return " ".join([event, *map(str, arguments)])


def _announce_multiprocessing() -> None:
    """Have `multiprocessing` raise an event for each process that it starts without a fork of this one, which raises its own."""
    start = multiprocessing.process.BaseProcess.start
    if hasattr(start, "is_announced"):
        return

    def announced(process: multiprocessing.process.BaseProcess) -> None:
        if (getattr(process, "_start_method", None) or multiprocessing.get_start_method()) != "fork":
            sys.audit(OF_MULTIPROCESSING, process.name)
        start(process)

    announced.is_announced = True  # type: ignore[attr-defined]
    multiprocessing.process.BaseProcess.start = announced  # type: ignore[method-assign]
