"""A rank, a host or the network fails while three real hosts train: the job ends soon with a reason, and no process
remains."""

import re
import time
from pathlib import Path

import pytest

from tests.cluster import faults
from tests.cluster.faults import FAILURE_TIMEOUT_S, SEEN_S, SLACK_S, Fault
from tests.cluster.jobs import ENDLESS, Job, Jobs
from tests.cluster.lab import Lab
from tests.cluster.test_lab_jobs import SAME, STARTS, cases, done

ENDLESSLY = {"train__updates": ENDLESS, "checkpoint__every_updates": 1000}
TIMEOUT = ["--failure-timeout-s", str(FAILURE_TIMEOUT_S)]


def training(jobs: Jobs, start: str, **more: object) -> Job:
    """An endless job that has made three updates."""
    job: Job = getattr(jobs, start)("struck", more=TIMEOUT, **ENDLESSLY, **more)
    return job.reach(3)


def ends(job: Job, *, within_s: float, reached: tuple[str, ...] = ("node1", "node2", "node3")) -> float:
    """Seconds until every command has ended on hosts that can be reached; all with exit code 1."""
    began = time.monotonic()
    outputs = [output for output in job.outputs if output.node in reached]
    for output in outputs:
        output.finish(timeout_s=within_s + SLACK_S)
    seconds = time.monotonic() - began
    assert [output.code for output in outputs] == [1] * len(outputs), job.leader.text
    return seconds


def told(job: Job, pattern: str) -> None:
    """The last words name the cause and the log."""
    words = "\n".join(reversed(job.leader.last[:60]))
    assert re.search(pattern, words, re.DOTALL), words
    assert "/logs/" in words, words


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "start"), cases(STARTS))
def test_a_killed_rank_ends_the_job_on_all_hosts(jobs: Jobs, lab: Lab, backend: str, start: str):
    job = training(jobs, start, backend=backend)
    lab.kill(lab.rank_on("node3"), "KILL")
    ends(job, within_s=SEEN_S)
    told(job, r"rank 2 on .*(10\.77\.0\.3|node3).*SIGKILL")
    assert lab.left(within_s=10.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "start"), cases(STARTS))
def test_a_rank_that_raises_is_told_last_with_its_traceback(jobs: Jobs, lab: Lab, backend: str, start: str):
    job: Job = getattr(jobs, start)("raising", backend=backend, model__name="exploding", **ENDLESSLY)
    job.reach(0)
    ends(job, within_s=SEEN_S + 5)
    told(job, r"rank 2 on .*(10\.77\.0\.3|node3).*Traceback")
    assert job.leader.last[0] == "RuntimeError: the fourth batch is on fire"
    assert lab.left(within_s=10.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*faults.SILENT, faults.HALT], ids=lambda fault: fault.name)
@pytest.mark.parametrize(("backend", "start"), cases(STARTS))
def test_a_host_that_is_lost_ends_the_job_on_the_others(jobs: Jobs, lab: Lab, backend: str, fault: Fault, start: str):
    job = training(jobs, start, backend=backend)
    fault.strike(lab, job)
    ends(job, within_s=fault.limit_s, reached=("node1", "node2"))
    told(job, fault.told)
    assert [process for process in lab.left(within_s=10.0) if process.node != "node3"] == []
    lab.left(within_s=FAILURE_TIMEOUT_S)  # the lost host notices by itself; the fixture looks


@pytest.mark.slow
@pytest.mark.parametrize("node", ["node1", "node3"])
def test_hosts_that_have_lost_their_leader_end_by_themselves(jobs: Jobs, lab: Lab, node: str):
    training(jobs, "over_ssh")
    lab.cut(node, on=True)
    assert lab.left(within_s=FAILURE_TIMEOUT_S + SLACK_S) == []


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_powered_off_host_of_the_leader_ends_the_job_on_the_others(jobs: Jobs, lab: Lab, start: str):
    training(jobs, start)
    lab.power("node1", "off")
    assert lab.left(within_s=FAILURE_TIMEOUT_S + SLACK_S) == []


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "outage"), cases(["cut", "link"]))
def test_an_outage_of_ten_seconds_is_survived(jobs: Jobs, lab: Lab, backend: str, outage: str):
    undisturbed = done(jobs.over_ssh("calm", backend=backend))
    job = jobs.over_ssh("outage", backend=backend).reach(3)
    lab.link("node3", up=False) if outage == "link" else lab.cut("node3", on=True)
    time.sleep(10)
    lab.link("node3", up=True) if outage == "link" else lab.cut("node3", on=False)
    assert done(job) == undisturbed


@pytest.mark.slow
def test_a_dead_ssh_session_ends_the_job_everywhere(jobs: Jobs, lab: Lab):
    job = training(jobs, "over_ssh")
    faults.SSH.strike(lab, job)
    ends(job, within_s=faults.SSH.limit_s)
    told(job, faults.SSH.told)
    assert lab.left(within_s=10.0) == []


# ----------------------------------------------------------------------------------------------------------- restart
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "start", "folder"), cases(STARTS, ["of each host", "shared"]))
def test_a_job_that_lost_a_rank_starts_again_and_ends_with_the_weights_of_the_undisturbed_one(
    jobs: Jobs, lab: Lab, private: Path, backend: str, start: str, folder: str
):
    where = {} if folder == "shared" else {"runs": private}
    undisturbed = done(getattr(jobs, start)("calm", backend=backend, **where))
    job: Job = getattr(jobs, start)("restarted", backend=backend, more=["--max-restarts", "1"], **where)
    lab.kill(job.reach(4) and lab.rank_on("node3"), "KILL")
    assert done(job) == undisturbed
    assert "starting again from step-" in job.leader.text
    assert job.updates().count(1) == 1, "not from the beginning"


@pytest.mark.slow
def test_a_job_waits_for_a_host_that_comes_back_before_it_starts_again(jobs: Jobs, lab: Lab):
    undisturbed = done(jobs.over_ssh("calm"))
    job = jobs.over_ssh("restarted", more=["--max-restarts", "1", "--failure-timeout-s", "30"]).reach(4)
    lab.power("node3", "halt")
    time.sleep(5)
    lab.up(4)
    assert done(job) == undisturbed


def test_a_killed_rank_of_hosts_started_by_hand_costs_no_bit(jobs: Jobs, lab: Lab):
    """The fast one of those above: three processes by hand, a kill, a restart, and the weights of one host."""
    calm = jobs.on_one("calm", backend="ddp", train__updates=6, evaluate__at_end="false")
    assert calm.finish().code == 0, calm.leader.text
    job = jobs.by_hand("restarted", train__updates=6, evaluate__at_end="false", more=["--max-restarts", "1"])
    lab.kill(job.reach(2) and lab.rank_on("node2"), "KILL")
    job.finish()
    assert [output.code for output in job.outputs] == [0, 0, 0], job.leader.text
    assert {key: job.summary()[key] for key in SAME} == {key: calm.summary()[key] for key in SAME}
