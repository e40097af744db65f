"""The start of a hundred hosts over ssh, of which one is dead and one slow: counted in commands, never in seconds.

The leader is a real ``mtrain train --cluster ssh``. Only ssh and the hosts are played (``benchmarks.growth.stand_in_hosts``):
a script named ssh joins the leader's pipes with those of a process that plays the agents of all hosts.
"""

import pytest

from benchmarks.growth import hosts
from benchmarks.growth.stand_in_hosts import address
from mtrain.jobs.hosts.agent_processes import MAX_CONNECTING

pytestmark = pytest.mark.job

HOSTS, DEAD, SLOW = 100, 37, 5


def test_a_dead_and_a_slow_host_of_a_hundred_hold_no_other_up_and_the_dead_one_is_named():
    """The first hosts wait until as many commands run as may; the two wait until all others are connected."""
    row = hosts.measure(HOSTS, ranks=1, dead=(DEAD,), last=(DEAD, SLOW), gate=MAX_CONNECTING)
    seen = hosts.connecting(row["connections"])
    addresses = [address(number) for number in range(HOSTS)]
    assert sorted(seen["begun"]) == sorted(addresses), "each command runs once"
    assert set(seen["begun"][:MAX_CONNECTING]) == set(addresses[:MAX_CONNECTING])
    assert seen["most_connecting"] == MAX_CONNECTING
    assert seen["connected_before_one_is_given_up"] >= HOSTS - 2
    assert row["connections"].count(f"={address(SLOW)}") == 1
    assert row["code"] == 2, row["console"]
    (bad,) = [line for line in row["console"].splitlines() if "cannot be reached by ssh" in line]
    assert address(DEAD) in bad
    assert "Connection timed out" in bad
    assert f"({HOSTS - 1} hosts)" in row["console"], "the slow one is compared with the others"
    assert "the job was not started: 1 thing to mend" in row["console"]
