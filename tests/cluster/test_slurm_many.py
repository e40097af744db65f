"""A job of sixteen nodes in a real Slurm, with stand-ins for the ranks: Slurm's commands are counted."""

import pytest

from benchmarks.growth import slurm_nodes
from tests.cluster.lab import Unavailable

NODES = 16


@pytest.mark.slow
def test_a_job_of_many_nodes_starts_once_on_each_is_shown_and_is_cancelled():
    try:
        row = slurm_nodes.measure(NODES)
    except Unavailable as reason:
        pytest.skip(f"hosts cannot be made here: {reason}")
    nodes = [f"node{number + 1}" for number in range(NODES)]
    assert sorted(row["started"]) == sorted(nodes), row["printed"]
    assert row["node_list"] == f"node[1-{NODES}]"
    assert row["listed"] == nodes
    assert (row["state"], row["printed"].splitlines()[-1]) == ("CANCELLED", "mtrain ended with exit code 143")
    calls = row["calls"]
    assert calls["submit"] == {"sbatch": 1}
    # One step for the agent of each node; scontrol lists the hosts for the batch script.
    assert calls["start"] == {"srun": NODES, "scontrol": 1}
    # The controller is asked for the job, for its queue, and for the names of all hosts at once.
    assert calls["status, twice"] == {"scontrol": 4}
