"""Faults that can happen to a job on three hosts, and the time in which it must end."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster.jobs import Job
from tests.cluster.lab import Lab, Process

SEEN_S = 10.0
"""From a fault that a peer can see to the end of the job."""
FAILURE_TIMEOUT_S = 20
"""``--failure-timeout-s`` of these jobs: from a fault that nobody can see to the end."""
SLACK_S = 60.0
"""More, before a test takes a job for one that hangs: this machine plays all the hosts, among other work. Nothing is
measured by tests; ``benchmarks/hosts_faults.py`` does."""


@dataclass(frozen=True)
class Fault:
    """One row of the table. The victim is always node3, which has rank 2."""

    name: str
    strike: Callable[[Lab, Job], None]
    limit_s: float
    told: str
    """A pattern that the last words match."""


def _kill_rank(lab: Lab, job: Job) -> None:
    lab.kill(lab.rank_on("node3"), "KILL")


def _kill_ssh(lab: Lab, job: Job) -> None:
    """The session that reaches node3, on the host of the leader."""
    lab.kill(ssh_to(lab, job.leader.node, "10.77.0.3"), "KILL")


def ssh_to(lab: Lab, node: str, address: str) -> Process:
    """The ssh client on ``node`` that holds a session with ``address``."""
    (actual,) = [p for p in lab.processes(node) if p.words[0].endswith("ssh") and any(address in w for w in p.words)]
    return actual


KILL = Fault("kill -9 one rank", _kill_rank, SEEN_S, r"rank 2 .*SIGKILL")
HALT = Fault("host halts", lambda lab, job: lab.power("node3", "halt"), SEEN_S, r"10\.77\.0\.3")
"""Its connections are closed."""
SSH = Fault("the ssh of a host dies", _kill_ssh, SEEN_S, r"10\.77\.0\.3")
"""Of jobs that were started over ssh."""
SILENT = [
    Fault("host powered off", lambda lab, job: lab.power("node3", "off"), FAILURE_TIMEOUT_S, r"10\.77\.0\.3.*silent"),
    Fault(
        "cable out for ever", lambda lab, job: lab.link("node3", up=False), FAILURE_TIMEOUT_S, r"10\.77\.0\.3.*silent"
    ),
    Fault(
        "switch drops silently", lambda lab, job: lab.cut("node3", on=True), FAILURE_TIMEOUT_S, r"10\.77\.0\.3.*silent"
    ),
]
"""Nothing comes any more."""
