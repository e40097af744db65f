"""DeepSpeed's own unit tests, in the process group of this job instead of processes that each test starts for itself.

Loaded by on_ranks.py; REFEREES/DeepSpeed is a checkout. Tests of other numbers of ranks and those that make their own group are
left out; those that its own marks or conditions skip on a CPU are skipped. A test's temporary folder is one for all ranks. Under
mtrain they run with what mtrain changes in DeepSpeed before it starts.
"""

import contextlib
import os
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(os.environ["REFEREES"]) / "DeepSpeed" / "tests"
RANKS = 2
OPERATORS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder")  # what their tests compile on a CPU
FILES = (
    "runtime/zero/test_zero_context.py",
    "runtime/zero/test_zero_context_ancestry.py",
    "runtime/zero/test_zero_context_return.py",
    "runtime/zero/test_zero_dynamic_class.py",
    "runtime/zero/test_zero_nesting_init.py",
    "runtime/zero/test_ignore_unused_parameters.py",
    "runtime/zero/test_unwrap_model.py",
    "runtime/zero/test_zero_grad_clip.py",
    "v1/zero/test_zero_coalesce_grad_reduction.py",
    "runtime/test_no_sync_ctxt.py",
    "checkpoint/test_tag_validation.py",
    "checkpoint/test_zero_optimizer.py",
    "comm/test_dist.py",
)
WORDS = ("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(TESTS), "-W", "ignore")
sys.path[:0] = [str(TESTS)]
os.environ["LOCAL_SIZE"] = str(RANKS)  # so many devices has a CPU, for DeepSpeed


class Watch:
    """A plugin of pytest: what is collected, and how a test ends."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.reports: list[Any] = []

    def pytest_collection_finish(self, session: Any) -> None:
        """Keep the names of what this number of ranks can run in a group that is there."""
        joins = [item for item in session.items if getattr(item.cls, "init_distributed", True)]
        self.names = [item.nodeid for item in joins if RANKS in ranks_of(item)]

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


def ranks_of(item: Any) -> set[int]:
    """The numbers of ranks that a test can be for, which are those of its fixtures too."""
    mark = item.get_closest_marker("world_size")
    given = getattr(item, "callspec", None) and item.callspec.params.get("world_size")
    fixtures = [getattr(found[-1].func, "world_size", None) for found in item._fixtureinfo.name2fixturedefs.values()]
    asked = [mark.args[0] if mark else given or getattr(item.cls, "world_size", RANKS), *filter(None, fixtures)]
    return set.intersection(*({ranks} if isinstance(ranks, int) else set(ranks) for ranks in asked))


def build_operators() -> None:
    """Compile what is missing, once and before any rank: that takes minutes, in which a job would seem to hang."""
    # In a folder of its own: who compiles waits without end for a lock that a killed process has left in the user's folder.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(TESTS.parents[1] / "torch_extensions"))
    if "RANK" not in os.environ:
        from deepspeed.accelerator import get_accelerator

        for name in OPERATORS:
            get_accelerator().create_op_builder(name).load(verbose=False)


def join() -> None:
    """Make the process group that this job's launcher describes, and let their tests run in it."""
    import deepspeed
    from unit import common

    if "MTRAIN_JOB_ATTEMPT" in os.environ:
        from mtrain.backends._deepspeed import internals

        internals.prepare_start()
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
    with names_alone():
        build_operators()
        pytest.main([*(str(TESTS / "unit" / file) for file in FILES), "--collect-only", "-qq", *WORDS], plugins=[watch])
    return unittest.TestSuite(Unit(node) for node in watch.names)


@contextlib.contextmanager
def names_alone() -> Iterator[None]:
    """Send what this process and compilers print elsewhere: names of tests alone are read from its output."""
    output = os.dup(1)
    os.dup2(2, 1)
    yield
    sys.stdout.flush()
    os.dup2(output, 1)
