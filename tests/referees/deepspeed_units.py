"""DeepSpeed's own unit tests, in the process group of this job instead of processes that each test starts for itself.

Loaded by on_ranks.py; REFEREES/DeepSpeed is a checkout. Tests of other numbers of ranks are skipped, and so are those that its
own marks or conditions skip on a CPU. A test's temporary folder is one for all ranks.
"""

import contextlib
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(os.environ["REFEREES"]) / "DeepSpeed" / "tests"
FILES = (
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_ancestry.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_dynamic_class.py",
    "runtime/zero/test_zero_nesting_init.py",
    "comm/test_dist.py",
)
WORDS = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(TESTS), "-W", "ignore")
sys.path[:0] = [str(TESTS)]


class Watch:
    """A plugin of pytest: what is collected, and how a test ends."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.reports: list[Any] = []

    def pytest_collection_finish(self, session: Any) -> None:
        """Keep the names."""
        self.names = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep what is no mere success."""
        if report.failed or report.skipped:
            self.reports.append(report)

    @pytest.fixture
    def tmpdir(self, request: Any) -> Any:
        """A folder that all ranks have."""
        import py

        folder = Path.cwd() / "temp" / re.sub(r"\W", "_", request.node.nodeid)[-150:]
        folder.mkdir(parents=True, exist_ok=True)
        return py.path.local(folder)


class Unit(unittest.TestCase):
    """One of their tests."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def id(self) -> str:
        """Its name, without dots and spaces."""
        return re.sub(r"[^\w:\[\]-]", "_", self._node.removeprefix("unit/"))

    def runTest(self) -> None:
        """Run it on this rank, with the others."""
        join()
        watch = Watch()
        pytest.main([str(TESTS / self._node), *WORDS], plugins=[watch])
        for report in watch.reports:
            if report.skipped:
                raise unittest.SkipTest(report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected")
            raise AssertionError(str(report.longrepr).strip().splitlines()[-1])


def join() -> None:
    """Make the process group that this job's launcher describes, and let their tests run in it."""
    import deepspeed
    from unit import common

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo")

    def run_here(test: Any, _request: Any, ranks: int | list[int]) -> None:
        if deepspeed.comm.get_world_size() not in ([ranks] if isinstance(ranks, int) else ranks):
            pytest.skip(f"for {ranks} ranks")
        test.run(**test._fixture_kwargs)

    common.DistributedExec._launch_with_file_store = run_here


def load_tests(_loader: Any, _tests: Any, _pattern: Any) -> unittest.TestSuite:
    """All tests of the files."""
    watch = Watch()
    with contextlib.redirect_stdout(sys.stderr):  # names alone are printed
        pytest.main([*(str(TESTS / "unit" / file) for file in FILES), "--collect-only", "-qq", *WORDS], plugins=[watch])
    return unittest.TestSuite(Unit(node) for node in watch.names)
