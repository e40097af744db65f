"""DeepSpeed's own launcher on each of several hosts: the same bits as on one host, and ends as clean."""

from importlib.util import find_spec

import pytest

from tests.cluster.jobs import ENDLESS, Jobs
from tests.cluster.lab import Lab
from tests.cluster.test_lab_jobs import SAME, done

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
BY_DEEPSPEED = {"backend": "deepspeed", "more": ["--launcher", "deepspeed"]}
PLUGINS = """
[launchers]
disabled = ["torchrun"]
"""


def test_hosts_with_other_numbers_of_ranks_learn_what_torchrun_learns(jobs: Jobs):
    """It numbers the ranks of a host otherwise then: the second host's begin with local rank 1."""
    one = done(jobs.on_one("torchrun", backend="deepspeed"))
    job = jobs.by_hand("deepspeed", ips="10.77.0.1:1,10.77.0.2:2", ranks=None, nodes=["node1", "node2"], **BY_DEEPSPEED)
    assert done(job) == one
    assert (job.folder / "hostfile").read_text() == "10.77.0.1 slots=1\n10.77.0.2 slots=2\n"
    assert all((job.folder / "logs" / f"rank-{rank}.log").stat().st_size for rank in range(3))


def test_it_is_brought_by_ssh_where_torchrun_is_disabled(jobs: Jobs, lab: Lab):
    (lab.share / "other.toml").write_text(PLUGINS)
    job = jobs.over_ssh("by-ssh", backend="deepspeed", plugins="other.toml")
    summary = done(job)
    assert set(summary) == set(SAME)
    assert "deepspeed.launcher.runner" in job.read("logs/host-2.log")


def test_a_killed_rank_ends_the_job_on_all_hosts_and_is_named(jobs: Jobs, lab: Lab):
    job = jobs.by_hand("killed", train__updates=ENDLESS, **BY_DEEPSPEED).reach(2)
    shell = lab.rank_on("node3")
    (rank,) = [process for process in lab.processes("node3") if process.parent == shell.pid]
    lab.kill(rank, "KILL")
    output = job.finish(timeout_s=60)
    assert output.code == 1
    assert output.last[0].startswith("error: rank 2 on 10.77.0.3 (node3) was ended by signal 9 (SIGKILL)"), output.text
