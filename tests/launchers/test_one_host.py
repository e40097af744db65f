"""The ranks of a job on one host are started without torchrun, and have what torchrun would give them."""

import os
import subprocess
import sys

import pytest

from mtrain.backends._torch import one_host

COMMON = ["--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=29500"]
WORKER = ["-m", "mtrain.rank.worker", "--run-dir", "runs/x"]


def test_a_job_on_one_host_needs_no_torchrun():
    assert one_host.fits(["--nnodes=1", *COMMON, "--max-restarts=0", "--log-dir=x", *WORKER])
    assert one_host.fits(["--nnodes=1", *COMMON, "ranks.py", "--nnodes=7"])


@pytest.mark.parametrize(
    "argv",
    [
        ["--nnodes=2", "--node-rank=0", *COMMON, *WORKER],
        ["--nnodes=1", *COMMON, "--max-restarts=1", *WORKER],
        ["--nnodes=1", *COMMON, "--rdzv-backend=c10d", *WORKER],
        ["--nnodes=1", "--nproc-per-node=gpu", *COMMON[1:], *WORKER],
        ["--nnodes=1", *COMMON, *WORKER, "--mode", "script", "--", "train.py"],
        ["--nnodes=1", *COMMON],
    ],
    ids=["two hosts", "restarts", "another rendezvous", "ranks per device", "a user's script", "no command"],
)
def test_whatever_torchrun_alone_knows_is_left_to_it(argv):
    assert not one_host.fits(argv)


def test_starting_ranks_imports_no_framework():
    program = "import sys, mtrain.backends._torch.starter; print({'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def variables(module: str) -> dict[str, dict[str, str]]:
    """Return the variables of each of two ranks that ``module`` starts, without those of this process."""
    before = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    command = [sys.executable, "-m", module, "--nnodes=1", *COMMON[:2], "--master-port=0", "-m", "timeit"]
    printing = "import os; os.write(1, (repr(dict(os.environ)) + chr(10)).encode())"
    result = subprocess.run(
        [*command, "-n1", "-r1", "-s", printing, "pass"],
        env={**before, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [eval(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {row["RANK"]: {name: value for name, value in row.items() if before.get(name) != value} for row in rows}


TORCHRUNS_OWN = {
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""Variables that differ: the port was drawn, rank 0 hosts the store instead of the starter, and the last two are messages
between torchrun and its own parts."""


@pytest.mark.slow
def test_a_rank_has_the_variables_that_torchrun_would_give_it():
    ours, theirs = variables("mtrain.backends._torch.starter"), variables("torch.distributed.run")
    assert ours.keys() == theirs.keys() == {"0", "1"}
    for rank in ours:
        different = {
            name for name in ours[rank].keys() | theirs[rank].keys() if ours[rank].get(name) != theirs[rank].get(name)
        }
        assert different <= TORCHRUNS_OWN, {name: (ours[rank].get(name), theirs[rank].get(name)) for name in different}
