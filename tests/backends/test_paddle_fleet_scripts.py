"""Scripts of Paddle Fleet that know nothing of mtrain, started by ``mtrain run --backend fleet``."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtrain.backends._paddle import ops

import paddle  # after the package that imports it without its warnings # isort: skip

pytestmark = pytest.mark.job

PORT = Path(__file__).parents[2] / "examples/ports/paddle_fleet"
QUIET = ("-o", "report.plots=false", "-o", "report.tensorboard=false", "-o", "cluster.threads=1")


def run(here: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python command in a folder."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=here, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def mtrain(ranks: int) -> list[str]:
    line = ["-m", "mtrain", "run", *QUIET, "--name", "a", "--backend", "fleet"]
    return [*line, "--nproc-per-node", str(ranks)]


def weights(here: Path) -> dict[str, np.ndarray]:
    """Return the weights that a script has saved; ``fleet.distributed_model`` puts a prefix before their names."""
    state = paddle.load(str(here / "weights.pdparams"))
    return {name.removeprefix("_layers."): np.array(ops.to_numpy(value)) for name, value in state.items()}


def test_an_unmodified_script_of_fleetrun_trains_on_two_ranks_as_one_process(tmp_path):
    """Two epochs. The one process runs the script without Fleet, which refuses a single rank in some versions of Paddle."""
    here = tmp_path / "here"
    shutil.copytree(PORT, here, ignore=shutil.ignore_patterns("__pycache__"))
    common = (here / "common.py").read_text()
    assert "EPOCHS, SEED, RATE = 96, 10, 42" in common
    (here / "common.py").write_text(common.replace("= 96, 10, 42", "= 96, 2, 42"))
    alone = run(here, "plain.py", "--fp64")
    assert alone.returncode == 0, alone.stderr
    one = weights(here)
    result = run(here, *mtrain(2), "peer.py", "--fp64")
    assert result.returncode == 0, result.stdout + result.stderr
    logs = [(here / f"runs/a/logs/rank-{rank}.log").read_text() for rank in range(2)]
    assert [re.search(r"accuracy of rank (\d)", log)[1] for log in logs] == ["0", "1"]
    two = weights(here)
    assert one.keys() == two.keys()
    assert {array.dtype for array in one.values()} == {np.dtype(np.float64)}
    largest = max(float(np.abs(one[name] - two[name]).max()) for name in one)
    print(f"Paddle Fleet, 1 process and 2 ranks: {largest:.1e}")
    assert 0 < largest <= 1e-12


@pytest.mark.slow
def test_its_first_rank_that_fails_is_named_with_its_error(tmp_path):
    (tmp_path / "failing.py").write_text(
        "from paddle.distributed import fleet, get_rank\n"
        "fleet.init(is_collective=True)\n"
        "if get_rank() == 1:\n    raise ValueError('a bad number')\n"
        "import time\ntime.sleep(60)\n"
    )
    result = run(tmp_path, *mtrain(2), "failing.py")
    assert result.returncode == 1
    assert "failed first: ValueError: a bad number" in result.stderr
