"""A job that cannot start says so at once, on every host, and which host is why."""

import re

import pytest

from tests.cluster.faults import FAILURE_TIMEOUT_S
from tests.cluster.jobs import FIRST, Job, Jobs
from tests.cluster.lab import Lab

QUICKLY_S = 60.0
"""Before a refusal is taken for a hang: this machine plays all the hosts, among other work."""


def refused(job: Job, pattern: str, *, code: int | tuple[int, ...] = 2, within_s: float = QUICKLY_S) -> str:
    """Return the leader's message; no rank was started and no traceback is shown."""
    for output in job.outputs:
        output.finish(timeout_s=within_s)
    codes = (code,) if isinstance(code, int) else code
    message = "\n".join(f"-- {output.node} ended with {output.code}\n{output.text}" for output in job.outputs)
    assert {output.code for output in job.outputs} <= set(codes), message
    text = job.leader.text
    assert re.search(pattern, text, re.DOTALL), text
    assert "Traceback" not in text
    assert job.updates() == []
    return text


@pytest.mark.slow
@pytest.mark.parametrize("start", ["over_ssh", "by_hand"])
def test_a_taken_port_is_named(jobs: Jobs, lab: Lab, start: str):
    with lab.listening("node1", 31234):
        refused(getattr(jobs, start)("taken", more=["--master-port", "31234"]), r"31234 is taken .*10\.77\.0\.1")


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_is_named(jobs: Jobs, lab: Lab):
    lab.cut("node3", on=True)
    refused(jobs.over_ssh("unreachable"), r"10\.77\.0\.3.*(timed out|no answer|not reach)")


@pytest.mark.slow
def test_a_host_without_an_ssh_server_is_named(jobs: Jobs, lab: Lab):
    lab.sshd("node3", "stop")
    try:
        refused(jobs.over_ssh("refusing"), r"10\.77\.0\.3.*refused")
    finally:
        lab.sshd("node3", "start")


@pytest.mark.slow
def test_a_host_that_was_never_started_is_named_with_the_line_to_type_there(jobs: Jobs):
    job = jobs.by_hand("lonely", nodes=("node1", "node2"), more=["--failure-timeout-s", str(FAILURE_TIMEOUT_S)])
    text = refused(job, r"10\.77\.0\.3", code=(1, 2), within_s=FAILURE_TIMEOUT_S + QUICKLY_S)
    assert "--ips 10.77.0.1,10.77.0.2,10.77.0.3" in text


@pytest.mark.slow
def test_hosts_that_wait_for_the_first_one_end_too(jobs: Jobs):
    job = jobs.by_hand("headless", nodes=("node2", "node3"), more=["--failure-timeout-s", str(FAILURE_TIMEOUT_S)])
    refused(job, r"10\.77\.0\.1", code=(1, 2), within_s=FAILURE_TIMEOUT_S + QUICKLY_S)


@pytest.mark.parametrize(
    ("node", "typed", "named"),
    [
        ("node3", ["-o", "train.batch_size=12"], r"10\.77\.0\.3 .*train\.batch_size: it has 12"),
        pytest.param(
            "node2", ["--nproc-per-node", "2"], r"10\.77\.0\.2 .*nproc_per_node: it has 2", marks=pytest.mark.slow
        ),
        pytest.param("node3", ["--ips", "10.77.0.1,10.77.0.3,10.77.0.2"], "--ips: it has ", marks=pytest.mark.slow),
    ],
    ids=["batch size", "number of ranks", "order of hosts"],
)
def test_a_host_with_another_job_is_named_with_the_first_difference(
    jobs: Jobs, node: str, typed: list[str], named: str
):
    """There and on the first host. The third is told, too, unless it comes much later: then it waits in vain."""
    job = jobs.by_hand("other", each={node: typed})
    refused(job, named, code=(1, 2), within_s=3 * QUICKLY_S)
    for output in job.outputs:
        if output.node in (FIRST, node):
            assert output.code == 2, output.text
            assert re.search(named, output.text), output.text


@pytest.mark.slow
def test_two_hosts_with_one_place_are_refused(jobs: Jobs):
    """The address of a host tells which place it may have, so the other one goes on waiting for its own."""
    job = jobs.by_hand("double", each={"node3": ["--node-rank", "1"]}, more=["--failure-timeout-s", "15"])
    refused(job, r"10\.77\.0\.3 asked to take part as host 10\.77\.0\.2, and was refused")
    assert "the first host does not take 10.77.0.3" in job.outputs[2].text


@pytest.mark.slow
def test_a_host_that_is_not_in_the_list_is_refused(jobs: Jobs):
    job = jobs.by_hand("stranger", nodes=("node4",))
    refused(job, r"this machine is not among them")


@pytest.mark.slow
def test_jobs_beside_each_other_on_the_same_hosts_do_not_disturb_each_other(jobs: Jobs):
    both = [jobs.over_ssh(name, train__updates=3, evaluate__at_end="false") for name in ("left", "right")]
    assert [job.finish().code for job in both] == [0, 0], [job.leader.text for job in both]
    assert [job.updates() for job in both] == [[0, 1, 2]] * 2
