"""Names that become known late are waited for; those that never do are named, with the time."""

import threading

import pytest

from mtrain.errors import UsageError
from mtrain.system import names

MINE = [("lo", "127.0.0.1"), ("eth0", "10.0.0.2")]


def known_after(counts: dict[str, int], addresses: dict[str, str]):
    """Return a resolver that knows each name from its N-th question on."""

    def resolver(host: str) -> list[str]:
        counts[host] -= 1
        return [addresses[host]] if counts[host] < 0 else []

    return resolver


def test_a_name_is_looked_up_until_it_has_an_address():
    resolver = known_after({"a": 0, "b": 2}, {"a": "10.0.0.1", "b": "10.0.0.2"})
    expected = {"a": ["10.0.0.1"], "b": ["10.0.0.2"], "::1": ["::1"]}
    assert names.resolve(["a", "b", "::1"], limit_s=30.0, resolver=resolver) == expected


def test_this_host_is_found_by_a_name_that_appears_late():
    resolver = known_after({"a": 10**9, "b": 2}, {"a": "10.0.0.1", "b": "10.0.0.2"})
    assert names.find_node_rank(["a", "b"], MINE, timeout_s=30, note=print, resolver=resolver) == 1


def test_names_that_stay_unknown_are_named_with_the_time(monkeypatch):
    monkeypatch.setattr(names, "NOTE_S", 0.1)
    notes: list[str] = []
    resolver = known_after({"a": 0, "b": 10**9, "c": 10**9}, {"a": "10.0.0.1"})
    with pytest.raises(
        UsageError, match=r"the names b, c did not resolve to an address within 1 s, so it is not known"
    ):
        names.find_node_rank(["a", "b", "c"], MINE, timeout_s=1, note=notes.append, resolver=resolver)
    assert notes == ["waiting until the names b, c are known here, to find which of the hosts this is"]


def test_a_machine_that_is_none_of_the_hosts_is_told_after_one_look_up_of_each_name():
    asked: list[str] = []

    def answer(address: str):
        return lambda host: asked.append(host) or [address]

    with pytest.raises(UsageError, match="is not among them"):
        names.find_node_rank(["10.0.0.8", "a"], MINE, timeout_s=60, note=print, resolver=answer("10.0.0.9"))
    with pytest.raises(UsageError, match="is several of them"):
        names.find_node_rank(["a", "10.0.0.2"], MINE, timeout_s=60, note=print, resolver=answer("127.0.0.1"))
    assert asked == ["a", "a"]


def test_a_name_that_no_server_answers_for_keeps_nobody_waiting(monkeypatch):
    hold = threading.Event()
    monkeypatch.setattr(
        names.placement, "resolve", lambda name: ["10.0.0.1"] if name == "fast" else hold.wait(60) and []
    )
    assert names.look_up(["fast", "slow", "::1"], limit_s=0.3) == {"fast": ["10.0.0.1"], "slow": [], "::1": ["::1"]}
    hold.set()
