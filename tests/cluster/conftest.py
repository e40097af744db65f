"""Three hosts for a session, as they were before every test."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import Jobs, prepare
from tests.cluster.lab import Lab, Unavailable

HOSTS = 4
"""node4 is in no job: it can start one on the others."""


@pytest.fixture(scope="session")
def running_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("hosts"))
    # Whoever ends pytest with SIGTERM gets the end that Ctrl-C has: without it the hosts would stay.
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        made.up(HOSTS)
        prepare(made.share)
        yield made
    except Unavailable as reason:
        pytest.skip(str(reason))
    finally:
        made.down()
        signal.signal(signal.SIGTERM, former)


@pytest.fixture
def lab(running_lab: Lab) -> Iterator[Lab]:
    """Four hosts; after a test nothing may run on any of them."""
    yield running_lab
    left = running_lab.left(within_s=10.0)
    running_lab.mend()
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
