"""Hosts that are named, and whose names become known late, or only on the hosts themselves."""

import re
from collections.abc import Iterator

import pytest

import mtrain
from mtrain.errors import UsageError
from mtrain.jobs.hosts import survey
from mtrain.jobs.hosts.connections import Addresses
from mtrain.system import placement
from tests.cluster.faults import FAILURE_TIMEOUT_S
from tests.cluster.jobs import UPDATES, Jobs, Output
from tests.cluster.lab import Lab, address, wait_for

HELLO = {"addresses": [["lo", "127.0.0.1"], ["eth0", "10.0.0.7"], ["eth0", "fe80::1"], ["docker0", "172.17.0.1"]]}


@pytest.mark.parametrize(
    ("name", "resolved", "interface", "expected"),
    [
        ("n7", ["127.0.1.1", "10.0.0.7"], None, "10.0.0.7"),
        ("n7", ["172.17.0.1"], "eth0", "172.17.0.1"),
        ("n7", [], "eth0", "10.0.0.7"),
        ("n7", ["127.0.1.1"], "docker0", "172.17.0.1"),
    ],
)
def test_an_address_that_the_host_has_reported_is_taken_in_place_of_its_name(
    monkeypatch, name, resolved, interface, expected
):
    monkeypatch.setattr(placement, "resolve", lambda host: resolved)
    assert survey.address_that_others_use(name, HELLO, interface=interface) == expected


def test_the_only_address_of_a_host_needs_no_name_server(monkeypatch):
    monkeypatch.setattr(placement, "resolve", lambda host: ["127.0.1.1"])
    assert survey.address_that_others_use("n7", {"addresses": HELLO["addresses"][:3]}) == "10.0.0.7"


def test_a_name_that_means_a_loopback_address_is_refused_with_the_addresses_to_choose_from(monkeypatch):
    monkeypatch.setattr(placement, "resolve", lambda host: ["127.0.1.1"])
    expected = r"needs the address of n7, whose name means 127\.0\.1\.1 here; .* 10\.0\.0\.7 \(eth0\), 172\.17\.0\.1 \(docker0\)"
    with pytest.raises(UsageError, match=expected):
        survey.address_that_others_use("n7", HELLO)
    monkeypatch.setattr(placement, "resolve", lambda host: [])
    with pytest.raises(UsageError, match="whose name has no address here"):
        survey.address_that_others_use("n7", HELLO)


def test_a_caller_is_no_impostor_before_the_name_of_its_host_is_known(monkeypatch):
    known: list[str] = []
    monkeypatch.setattr(placement, "resolve", lambda host: known)
    monkeypatch.setattr("mtrain.jobs.hosts.connections.UNKNOWN_S", 0.0)
    addresses = Addresses(["n1"])
    assert not addresses.addresses_of("n1")
    assert not addresses.of("n1", "10.0.0.1")
    known.append("10.0.0.1")
    assert addresses.addresses_of("n1")
    assert addresses.of("n1", "10.0.0.1")
    assert not addresses.of("n1", "10.0.0.2")


# ----------------------------------------------------------------------------------------------- hosts of a real network
@pytest.fixture
def nameless(lab: Lab) -> Iterator[Lab]:
    """Hosts that know no name of another host, nor their own."""
    nodes = ("node1", "node2", "node3")
    for node in nodes:
        lab.run(node, ["sh", "-c", "cp /etc/hosts /etc/hosts.whole; grep localhost /etc/hosts.whole > /etc/hosts"])
    yield lab
    for node in nodes:
        lab.run(node, ["sh", "-c", "cat /etc/hosts.whole > /etc/hosts"])


def learn(lab: Lab, node: str, *names: str) -> None:
    """Let a host know names from now on."""
    lines = "".join(f"{address(name)} {name}\n" for name in names)
    lab.run(node, ["sh", "-c", f"printf '{lines}' >> /etc/hosts"])


def told(output: Output, text: str) -> None:
    """Wait until a command has printed ``text``."""
    wait_for(lambda: text in output.text, what=f"{text!r} on {output.node}")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fleet", "horovod", "deepspeed"])
def test_hosts_that_are_started_by_hand_wait_until_their_names_are_known(jobs: Jobs, nameless: Lab, backend: str):
    job = jobs.by_hand("late", nodes=("node1", "node2"), backend=backend, ips="node1,node2")
    for output in job.outputs:
        told(output, "waiting until the names node1, node2 are known here, to find which of the hosts this is")
    learn(nameless, "node2", "node1", "node2")
    told(job.outputs[1], "waiting for the first host, node1; start the job there too")
    learn(nameless, "node1", "node1")
    told(job.leader, "waiting for node2, until the name node2 is known here; start the job there too")
    learn(nameless, "node1", "node2")
    assert job.finish().code == 0, job.leader.text
    assert job.updates() == list(range(UPDATES))
    assert "Traceback" not in "".join(output.text for output in job.outputs)
    if backend == "fleet":
        plan = job.read("plan.txt")
        assert re.search(r"--master 10\.77\.0\.1:\d+ .*--rank 1 --host 10\.77\.0\.2 ", plan), plan


@pytest.mark.slow
def test_a_place_that_a_scheduler_tells_needs_no_name_and_the_hosts_wait_for_those_of_the_others(
    jobs: Jobs, nameless: Lab
):
    each = {"node1": ["--node-rank", "0"], "node2": ["--node-rank", "1"]}
    job = jobs.by_hand("told", nodes=("node1", "node2"), ips="node1,node2", each=each)
    told(job.leader, "waiting until the name node1 is known here, where hosts will meet")
    told(job.outputs[1], "waiting for the first host, node1, until the name node1 is known here;")
    learn(nameless, "node1", "node1")
    learn(nameless, "node2", "node1")  # it calls before its own name is known to the first host, and to itself
    told(job.leader, "waiting for node2, until the name node2 is known here;")
    learn(nameless, "node1", "node2")
    told(job.leader, "waiting until the name node2 is known on node2")
    learn(nameless, "node2", "node2")
    assert job.finish().code == 0, job.leader.text
    assert job.updates() == list(range(UPDATES))


@pytest.mark.slow
def test_a_name_that_never_resolves_is_named_with_the_host_and_the_time(jobs: Jobs, nameless: Lab):
    for node in ("node1", "node2", "node3"):
        learn(nameless, node, *(name for name in ("node1", "node2", "node3") if (node, name) != ("node2", "node3")))
    more = ["--failure-timeout-s", str(FAILURE_TIMEOUT_S)]
    job = jobs.by_hand("never", ips="node1,node2,node3", more=more)
    for output in job.outputs:
        output.finish(timeout_s=FAILURE_TIMEOUT_S + 90)
        assert output.code == 2, output.text
    expected = rf"address +bad +node2 +does not know the name node3, also not within {FAILURE_TIMEOUT_S} s"
    assert re.search(expected, job.leader.text), job.leader.text
    assert job.updates() == []


@pytest.mark.slow
def test_a_host_that_never_learns_which_one_it_is_says_so(jobs: Jobs, nameless: Lab):
    more = ["--failure-timeout-s", "6"]
    job = jobs.by_hand("lost", nodes=("node1",), ips="node1,node2", more=more)
    assert job.finish(timeout_s=60).code == 2
    assert "the names node1, node2 did not resolve to an address within 6 s" in job.leader.last[0]
    job = jobs.by_hand("lost", nodes=("node1",), ips="node1,node2", more=[*more, "--node-rank", "1"])
    assert job.finish(timeout_s=60).code in (1, 2)
    assert "the name node1 did not resolve to an address within 6 s, so the first host" in job.leader.text
    job = jobs.by_hand("lost", nodes=("node1",), ips="node1,node2", more=[*more, "--node-rank", "0"])
    assert job.finish(timeout_s=60).code == 2
    assert "the name node1 did not resolve to an address within 6 s on the first host itself" in job.leader.text


@pytest.mark.slow
def test_fleet_takes_names_over_ssh_and_every_host_receives_the_same_address(jobs: Jobs, lab: Lab):
    job = jobs.over_ssh("named", backend="fleet", ips="node1,node2,node3")
    assert job.finish().code == 0, job.leader.text
    assert job.updates() == list(range(UPDATES))
    plan = job.read("plan.txt")
    assert plan.count("--master 10.77.0.1:") == 3
    assert [re.search(rf"--rank {node} --host (\S+)", plan)[1] for node in range(3)] == [
        "10.77.0.1",
        "10.77.0.2",
        "10.77.0.3",
    ]


@pytest.mark.slow
def test_fleet_refuses_a_name_that_means_a_loopback_address_on_its_host(jobs: Jobs, lab: Lab):
    """As on Debian: the own name in /etc/hosts."""
    lab.run("node1", ["sh", "-c", "cp /etc/hosts /etc/hosts.whole; sed -i 's/^10.77.0.1 /127.0.1.1 /' /etc/hosts"])
    try:
        job = jobs.over_ssh("debian", at="node4", backend="fleet", ips="node1,node2")
        assert job.finish().code == 2, job.leader.text
    finally:
        lab.run("node1", ["sh", "-c", "cat /etc/hosts.whole > /etc/hosts"])
    assert re.search(r"node1 means 127\.0\.1\.1 .*10\.77\.0\.1 \(eth0\)", job.leader.text), job.leader.text
    assert "Traceback" not in job.leader.text


def test_a_plan_with_names_says_that_the_launcher_will_take_addresses():
    plan = mtrain.plan("digits", backend="fleet", ranks=1, overrides={"cluster.ips": ["n1.local", "n2"]})
    assert plan.numbers["names"] == "fleetrun takes addresses: n1.local, n2 become theirs when hosts are asked"
    alone = mtrain.plan("digits", backend="fleet", ranks=1, overrides={"cluster.ips": ["n1"]})
    assert "names" not in alone.numbers
    assert "n1" not in alone.commands[0].argv
    names = mtrain.plan("digits", backend="ddp", ranks=1, overrides={"cluster.ips": ["n1", "n2"]})
    assert "--master-addr=n1" in names.commands[0].argv
