"""Scripts of Horovod with torch that know nothing of mtrain, started by ``mtrain run --backend horovod``."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.script.runs import done, run

pytestmark = pytest.mark.horovod
PORT = Path(__file__).parents[2] / "examples/ports/horovod_mnist"


def trained(here: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Train Horovod's example in its unmodified form, and return the weights that rank 0 has saved."""
    shutil.copytree(PORT, here, ignore=shutil.ignore_patterns("__pycache__"))
    done(here, "--name", "a", "--backend", "horovod", "--nproc-per-node", str(ranks), "peer.py", "--fp64")
    logs = sorted(path.name for path in (here / "runs/a/logs").glob("rank-*.log"))
    assert logs == [f"rank-{rank}.log" for rank in range(ranks)]
    return torch.load(here / "weights.pt")


@pytest.mark.job
def test_an_unmodified_script_trains_on_two_ranks_as_on_one(tmp_path):
    one, two = trained(tmp_path / "1", 1), trained(tmp_path / "2", 2)
    assert one.keys() == two.keys()
    assert {weight.dtype for weight in one.values()} == {torch.float64}
    largest = max(float((one[name] - two[name]).abs().max()) for name in one)
    print(f"Horovod with torch, 1 and 2 ranks: {largest:.1e}")
    assert largest <= 1e-12


@pytest.mark.slow
def test_its_first_rank_that_fails_is_named_with_its_error(tmp_path):
    failing = "import horovod.torch as hvd\nhvd.init()\nif hvd.rank() == 1:\n    raise ValueError('a bad number')\nhvd.join()\n"
    (tmp_path / "failing.py").write_text(failing)
    result = run(tmp_path, "--backend", "horovod", "--nproc-per-node", "2", "failing.py")
    assert result.returncode == 1
    assert "failed first: ValueError: a bad number" in result.stderr
