"""Hosts that are started by hand, or told what to do, in large numbers: counted in looks and bytes, never in seconds."""

import json

import pytest

from mtrain.jobs.hosts import messages
from mtrain.jobs.hosts.connections import Addresses
from mtrain.jobs.hosts.rendezvous import Meeting
from mtrain.system import placement


def hosts_of(count: int) -> list[str]:
    return [f"10.88.{number // 250}.{number % 250 + 1}" for number in range(count)]


class Connected:
    """A member whose connection is looked at; counts how often."""

    looks = 0
    label = "a host"

    @property
    def channel(self) -> "Connected":
        Connected.looks += 1
        return self

    lost = None


@pytest.mark.parametrize("count", [50, 400])
def test_a_look_at_who_is_missing_looks_at_every_host_once(count):
    meeting = object.__new__(Meeting)
    meeting._members = {node: Connected() for node in range(count // 2)}
    Connected.looks = 0
    assert meeting._missing(range(count)) == list(range(count // 2, count))
    assert Connected.looks <= count


def test_a_caller_is_found_among_addresses_without_looking_up_any(monkeypatch):
    looked_up = []
    monkeypatch.setattr(placement, "resolve", lambda host: looked_up.append(host) or ["192.0.2.7"])
    addresses = Addresses([*hosts_of(1000), "node7", "FD00::1"])
    assert all(addresses.holds(address) for address in (*hosts_of(1000), "fd00::1"))
    assert looked_up == []
    assert addresses.holds("192.0.2.7")
    assert not addresses.holds("192.0.2.8")
    assert set(looked_up) == {"node7"}


def test_the_spec_of_many_hosts_is_sent_in_a_few_bytes_for_each_and_arrives_as_it_is():
    files = {
        "spec.json": json.dumps(
            {"cluster": {"hosts": hosts_of(1000)}, "lone": "a\udc80b"}, ensure_ascii=False, indent=1
        ),
        "small.json": "{}",
    }
    packed = json.loads(json.dumps(messages.pack_files(files)))
    assert messages.unpack_files(packed) == files
    assert packed["small.json"] == "{}"
    print(f"{len(files['spec.json'])} bytes as {len(json.dumps(packed))}")
    assert len(json.dumps(packed)) < 6 * 1000
