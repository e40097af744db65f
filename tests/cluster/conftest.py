"""Three hosts for a session, as they were before every test."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from mtrain.core.interfaces import HostedJob
from mtrain.jobs.hosts.agent_processes import AgentProcesses
from tests.cluster.jobs import Jobs, prepare
from tests.cluster.lab import Lab, Unavailable
from tests.cluster.slurm_lab import SlurmLab
from tests.starts import starts_processes

HOSTS = 4
"""node4 is in no job: it can start one on the others."""
SLURM_HOSTS = 3
LabT = TypeVar("LabT", bound=Lab)


@contextmanager
def running(made: LabT, hosts: int) -> Iterator[LabT]:
    """The hosts, up while inside; a test that asks for them where they cannot be is skipped."""
    # Whoever ends pytest with SIGTERM gets the end that Ctrl-C has: without it the hosts would stay.
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        made.up(hosts)
        prepare(made.share)
        yield made
    except Unavailable as reason:
        pytest.skip(f"hosts cannot be made here: {reason}")
    finally:
        made.down()
        signal.signal(signal.SIGTERM, former)


@pytest.fixture(scope="session")
@starts_processes
def running_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running(Lab(tmp_path_factory.mktemp("hosts")), HOSTS) as made:
        yield made


@pytest.fixture(scope="session")
@starts_processes
def running_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    with running(SlurmLab(tmp_path_factory.mktemp("slurm")), SLURM_HOSTS) as made:
        yield made


@pytest.fixture
def lab(running_lab: Lab) -> Iterator[Lab]:
    """Four hosts; after a test nothing may run on any of them."""
    yield running_lab
    left = running_lab.left(within_s=10.0)
    running_lab.mend()
    assert left == [], "processes were left behind"


@pytest.fixture
def slurm(running_slurm: SlurmLab) -> Iterator[SlurmLab]:
    """Three hosts of a Slurm; after a test no job may be left in it, and nothing may run on its hosts."""
    yield running_slurm
    running_slurm.run("node1", ["scancel", "--user=root"])
    left = running_slurm.left(within_s=10.0)
    running_slurm.mend()
    assert left == [], "processes were left behind"


@pytest.fixture
def jobs(lab: Lab) -> Iterator[Jobs]:
    made = Jobs(lab)
    yield made
    made.end()


@pytest.fixture
def private(lab: Lab) -> Path:
    """A folder that has the same name on every host, and is not the same."""
    return Path("/tmp/private-runs")


@pytest.fixture
def agents() -> Iterator[Callable[[Sequence[Sequence[str]]], AgentProcesses]]:
    """Connections to hosts, each made by a command of its own; they are closed at the end."""
    made: list[AgentProcesses] = []

    def make(commands: Sequence[Sequence[str]]) -> AgentProcesses:
        job = HostedJob(
            hosts=[f"10.9.0.{number + 1}" for number in range(len(commands))],
            agent=["python"],
            failure_timeout_s=30,
            note=lambda text: None,
            cluster="trial",
        )
        made.append(AgentProcesses(job, commands, environ=os.environ))
        return made[-1]

    yield make
    for each in made:
        each.close()
