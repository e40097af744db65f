"""Each check of the kit notices a fault that is planted for it."""

import json
import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
from tests.testing.conftest import KIT, solo_learns
from tests.testing.faults import FAULTS

from mtrain.core.interfaces import Array
from mtrain_kit import teardown
from mtrain_kit.catalogue import CHECKS, DIES, ENTERS, LEAVES, LIGHT, ON_RANKS, ONE, TASK
from mtrain_kit.check_context import Surroundings
from tests.starts import starts_processes

BY_WHOLE_JOBS = {LIGHT, ENTERS, ONE, DIES, TASK}
"""Their faults are in ``test_torch_kit.py``."""


@pytest.fixture(scope="module")
@starts_processes
def noticed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fault -> measures of each rank; two ranks meet all faults, one after the other."""
    folder = tmp_path_factory.mktemp("faults")
    references = solo_learns(folder)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv += ["-m", "tests.testing.fault_ranks", str(references), str(folder / "found.json")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.run(argv, cwd=KIT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


def test_each_fault_is_noticed_by_the_check_that_it_was_planted_for(noticed: dict[str, Any]) -> None:
    unnoticed = [f for f in FAULTS if all(measure["ok"] for rank in noticed[f] for measure in rank)]
    assert unnoticed == []


def test_every_check_on_ranks_has_a_fault_that_it_notices() -> None:
    planted = {check for _, check in FAULTS.values()}
    assert planted == {check.id for check in ON_RANKS}
    assert {*ON_RANKS, *BY_WHOLE_JOBS, LEAVES} == set(CHECKS)


def test_summed_gradients_are_called_by_their_name(noticed: dict[str, Any]) -> None:
    details = [m["detail"] for m in noticed["gradients are summed"][0] if m["what"].startswith("norms")]
    assert details == ["the first is 2 times that of solo, which is the number of ranks: summed, not averaged"]


class TestLeaving:
    """Threads and processes that outlive the backend are found; what was there before is not."""

    @pytest.fixture(autouse=True)
    def quickly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mtrain_kit.check_context.SETTLING_S", 0.2)

    def left(self, before: Surroundings, job: str) -> dict[str, float]:
        actual = teardown.measure_left(job, before, ranks=[os.getpid()], usual_threads={})
        return {measure.what: measure.value for measure in actual}

    def test_nothing(self) -> None:
        assert self.left(Surroundings.now("a"), "a") == {"processes": 0, "threads": 0}

    def test_a_thread(self) -> None:
        import threading

        end, before = threading.Event(), Surroundings.now("b")
        thread = threading.Thread(target=end.wait)
        thread.start()
        try:
            assert self.left(before, "b")["threads"] >= 1
        finally:
            end.set()
            thread.join()

    @pytest.mark.job
    def test_a_process_that_hangs_elsewhere(self) -> None:
        before = Surroundings.now("c")
        env = {**os.environ, "MTRAIN_CONFORMANCE_JOB": "c"}
        child = subprocess.Popen(["sleep", "60"], env=env, start_new_session=True)
        try:
            # Linux shows the environment of a process some moments after exec has let its parent go on.
            deadline = time.monotonic() + 30
            while not psutil.Process(child.pid).environ() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert self.left(before, "c")["processes"] == 1
        finally:
            child.kill()
            child.wait()


def test_arrays_that_are_not_finite_never_agree() -> None:
    import numpy as np

    from mtrain_kit import training

    def differs(a: Array, b: Array) -> bool:
        return not training.differences({"x": a}, {"x": b})["x"] <= 1e9

    assert differs(np.ones(2), np.array([1.0, np.nan]))
    assert differs(np.ones(2), np.array([1.0, np.inf]))
    assert differs(np.ones(2), np.ones(3))
    assert not differs(np.ones(2), np.ones(2))
