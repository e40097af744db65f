"""Two ranks learn what one rank learns; and the comparison that says so fails for each planted fault."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.core.placement import free_port
from tests.contract import training
from tests.contract.cases import EQUAL, FAULTY, SIZES, reference_of
from tests.contract.conftest import ROOT
from tests.contract.training import Case
from tests.framework import Framework

STARTERS = {
    "torch": {
        "ddp": lambda size, out: (
            *("-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={size}"),
        ),
        "horovod": lambda size, out: (
            *("-m", "horovod.runner.launch", "--gloo", "-np", str(size), "-H", f"127.0.0.1:{size}", sys.executable),
        ),
    },
    "paddle": {
        "fleet": lambda size, out: (
            *(
                "-m",
                "paddle.distributed.launch",
                "--master",
                f"127.0.0.1:{free_port()}",
                "--nnodes",
                "1",
                "--rank",
                "0",
            ),
            *("--host", "127.0.0.1", "--nproc_per_node", str(size), "--log_dir", str(out / "log"), sys.executable),
        ),
    },
}
"""How ranks of each framework's backends are started, as arguments of python that end where a script's would follow."""

MODULES = {"ddp": "torch", "horovod": "horovod", "fleet": "paddle"}
"""What each needs."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", STARTERS[metafunc.config.getoption("framework")])


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory, framework: Framework) -> Any:
    """Folder of what ``size`` ranks of a backend found; started once each."""

    @cache
    def start(backend: str, size: int) -> Path:
        if find_spec(MODULES[backend]) is None:
            pytest.skip(f"{backend} is not installed here")
        out = tmp_path_factory.mktemp(f"{backend}-{size}")
        argv = [
            sys.executable,
            *STARTERS[framework.name][backend](size, out),
            "-m",
            "tests.contract.ranks",
            backend,
            str(out),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return out

    return start


@pytest.fixture(scope="session")
def alone(framework: Framework) -> Any:
    """What one rank without any exchange learns, by case."""
    framework.one_thread()

    @cache
    def learn(case: Case) -> dict[str, np.ndarray]:
        with framework.solo() as backend:
            return training.train(backend, case)

    return learn


@pytest.mark.parametrize("case", EQUAL, ids=lambda case: case.key)
@pytest.mark.parametrize("size", SIZES)
def test_many_ranks_learn_what_one_rank_learns(outcome: Any, alone: Any, backend: str, size: int, case: Case) -> None:
    learnt = dict(np.load(outcome(backend, size) / f"{case.key}.npz"))
    reference = alone(reference_of(case))
    found = training.differences(reference, learnt)
    print(f"{backend} x {size}, {case.key}: largest relative difference {max(found.values()):.1e}")
    assert training.disagreements(reference, learnt) == []


@pytest.mark.parametrize("case", FAULTY, ids=lambda case: case.fault)
@pytest.mark.parametrize("size", [s for s in SIZES if s > 1])
def test_the_comparison_notices_a_planted_fault(outcome: Any, alone: Any, backend: str, size: int, case: Case) -> None:
    learnt = dict(np.load(outcome(backend, size) / f"{case.key}.npz"))
    assert training.disagreements(alone(reference_of(case)), learnt) != []


def test_some_updates_are_clipped_and_others_are_not(alone: Any) -> None:
    norms = alone(Case())["norms"]
    assert (norms > Case().clip_norm).any()
    assert (norms < Case().clip_norm).any()


def test_clipping_changes_what_is_learnt(alone: Any) -> None:
    assert training.disagreements(alone(Case()), alone(Case(clip_norm=float("inf")))) != []


@pytest.mark.parametrize("size", SIZES)
class TestEveryRank:
    """What holds on each rank of a job, not on rank 0 alone."""

    @pytest.fixture
    def facts(self, outcome: Any, backend: str, size: int) -> Any:
        return json.loads((outcome(backend, size) / "facts.json").read_text())

    def test_reduces_and_gathers(self, facts: Any, size: int) -> None:
        total = size * (size + 1) / 2
        for rank, found in enumerate(each["collectives"] for each in facts):
            assert found == {
                "size": size,
                "sum": [total, -total],
                "gradient": False,
                "max": [float(size), -1.0],
                "mean": total / size,
                "untouched": [rank + 1.0, -(rank + 1.0)],
                "gathered": [{"rank": r} for r in range(size)],
                "broadcast": 10,
            }

    def test_skips_an_update_that_is_not_finite_on_one_of_them(self, facts: Any) -> None:
        for found in (each["nonfinite"] for each in facts):
            assert found["finite"] == [True, True, False, True]
            assert found["kept"]
            counters = found["counters"]
            assert (counters["updates"], counters["skipped"], counters["skipped_in_a_row"]) == (3, 1, 0)

    def test_holds_the_averages_of_rank_0_while_inside_and_its_own_weights_after(self, facts: Any, size: int) -> None:
        for found in (each["averaging"] for each in facts):
            assert found == {
                "restored": True,
                "changed": True,
                "equal": True,
                "expected": True,
                "buffers_differed": size > 1,
            }

    def test_goes_on_bit_for_bit_from_a_state(self, facts: Any) -> None:
        for found in (each[key] for each in facts for key in ("resuming", "resuming_without_accumulation")):
            # 2 convolutions, 2 x 2 BatchNorm, weight and bias of the head
            assert found == {"round_trip": True, "continued": True, "counters": True, "moments": 8}

    def test_leaves_no_thread_behind_that_could_abort_the_process_at_its_end(
        self, outcome: Any, backend: str, size: int
    ) -> None:
        for rank in range(size):
            threads = json.loads((outcome(backend, size) / f"threads-{rank}.json").read_text())
            assert [name for name in threads if "gloo" in name] == []

    def test_refuses_to_start_from_unequal_weights(self, facts: Any, size: int) -> None:
        for found in (each["unequal_start"] for each in facts):
            assert (f"ranks {size - 1} start from other weights than rank 0" in found) is (size > 1)
