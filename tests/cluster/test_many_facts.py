"""The preflight of many hosts: how much is asked and told of each, and which hosts are called odd."""

import copy
import json

import pytest

from mtrain.jobs.hosts import survey
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.preflight import checks, majority
from mtrain.jobs.preflight.comparison import HostFacts, compare
from mtrain.jobs.preflight.findings import Finding, in_short, merge_findings, table
from mtrain.jobs.preflight.partners import EVERYBODY, partners
from tests.cluster.test_preflight_checks import FACTS, wanted


def address(number: int) -> str:
    return f"10.0.{number // 200}.{number % 200 + 1}"


def facts_of(number: int) -> dict:
    facts = copy.deepcopy(FACTS)
    facts |= {"host": f"node{number}", "identity": f"machine {number}", "names": {address(number): [address(number)]}}
    facts["addresses"] = [["lo", "127.0.0.1"], ["eth0", address(number)]]
    return facts


def hosts(count: int) -> list[HostFacts]:
    return [
        HostFacts(index=number, required=wanted(address(number)), facts=facts_of(number)) for number in range(count)
    ]


def odd(findings):
    return [finding for finding in findings if finding.state != "ok"]


@pytest.mark.parametrize("count", [2, 3, EVERYBODY, EVERYBODY + 1, 100, 1000])
def test_hosts_test_one_another_all_of_a_few_and_a_logarithm_of_many(count):
    chosen = [set(partners(node, count)) for node in range(count)]
    assert all(node in chosen[other] for node in range(count) for other in chosen[node])  # both ways
    assert all(node not in chosen[node] for node in range(count))
    assert chosen[0] == set(range(1, count))
    most = max(map(len, chosen[1:]))
    assert most == count - 1 if count <= EVERYBODY else most <= 2 * count.bit_length() + 1


class Channel:
    """The channel to an agent that answers at once, and the bytes of what it was asked."""

    asked_bytes = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def ask(self, verb, **fields):
        Channel.asked_bytes += len(json.dumps(fields))
        self._answer = {
            "facts": lambda: {"facts": facts_of(self.number)},
            "listen": lambda: {"port": 1, "word": "w" * 32, "clock": 0.0},
            "connect": lambda: {"reached": ["dead" if self.dead(each) else "" for each in fields["targets"]]},
            "resolve": lambda: {"addresses": {name: [name] for name in fields["hosts"]}},
        }[verb]()
        return 0

    def dead(self, target) -> bool:
        return False

    def answer(self, number, **limits):
        return self._answer


def preflight_bytes(count: int, channel=Channel) -> tuple[int, list[Finding]]:
    Channel.asked_bytes = 0
    required = [wanted(address(number), names=[]) for number in range(count)]
    found = checks.preflight([channel(number) for number in range(count)], required, now=lambda: 0.0)
    return Channel.asked_bytes, found


def test_what_the_preflight_asks_grows_with_the_hosts_and_not_with_their_square():
    fewer, _ = preflight_bytes(100)
    more, found = preflight_bytes(400)
    assert odd(found) == []
    assert more < 6 * fewer
    assert "a choice of" in found[-1].text
    assert len(table(found)) < 2000


def test_a_host_that_none_reaches_is_one_finding_that_names_those_who_tried():
    class Behind(Channel):
        def dead(self, target):
            return target["address"] == address(7)

    _, found = preflight_bytes(100, Behind)
    (finding,) = odd(found)
    assert f"does not reach {address(7)} (node7)" in finding.text
    assert f"{address(0)} (node0)" in finding.hosts
    assert len(finding.hosts) == len(partners(7, 100))


def test_names_are_asked_of_each_host_for_its_partners():
    members = {
        number: Member(node=number, host=f"node{number}", channel=Channel(number), hello={}) for number in range(400)
    }
    Channel.asked_bytes = 0
    survey.await_names(
        members,
        [*(member.host for member in members.values()), "master"],
        timeout_s=1.0,
        note=lambda text: None,
        stop=lambda: False,
    )
    assert Channel.asked_bytes < 400 * 40 * 20
    names = survey._names_for(members, [*(member.host for member in members.values()), "master"])
    assert len(names[0]) == 401
    assert {"node5", "node0", "node6", "node4", "master"} <= set(names[5])


def test_the_odd_host_is_named_and_not_all_others_also_where_it_is_the_first():
    host_facts = hosts(100)
    python = host_facts[0].facts["python"]
    python["python"] = "3.12.1"
    python["packages"] = {"numpy": "1.0.0"}
    python["modules"] = {"torch": "torch 2.1.0"}
    python["code"] = {"folder": "/old", "digest": "b" * 64}
    host_facts[0].facts["data"] |= {"digest": "y"}
    found = odd(compare(host_facts))
    assert {finding.hosts for finding in found} == {(host_facts[0].label,)}
    assert [finding.check for finding in found] == ["python", "mtrain", "packages", "packages", "data"]
    assert "is Python 3.12.1, expected 3.11.7 as on 10.0.0.2 (node1)" in found[0].text


def test_of_two_hosts_that_differ_the_first_is_the_reference():
    assert majority.reference(["a", "b"], str) == "a"
    assert majority.reference(["a", "b", "b"], str) == "b"


def test_what_all_hosts_share_is_told_once():
    host_facts = hosts(100)
    host_facts[41].facts["addresses"][1][0] = "ib0"
    text = compare(host_facts)[0].text
    assert text == "100 hosts at addresses of their own: eth0 on 99 hosts; ib0 on 10.0.0.42 (node41)"


def test_different_gpus_of_many_hosts_are_told_by_kind():
    host_facts = hosts(100)
    for host in host_facts:
        host.facts["devices"] = {"present": 8, "models": ["slow" if host.index == 3 else "fast"]}
    (found,) = odd(compare(host_facts))
    assert "(fast on 99 hosts; slow on 10.0.0.4 (node3))" in found.text


def test_a_finding_of_many_hosts_is_one_row_with_the_number_of_hosts():
    host_facts = hosts(100)
    for host in host_facts[10:60]:
        host.facts["python"]["packages"] = {"numpy": "1.0.0"}
    (found,) = odd(merge_findings(compare(host_facts)))
    assert len(found.hosts) == 50
    assert len(merge_findings(compare(host_facts))) < 12
    assert "(50 hosts)" in found.line()
    assert len(found.line()) < 400


def test_many_findings_that_differ_are_shown_in_part_and_kept_whole():
    host_facts = hosts(100)
    for host in host_facts:
        host.facts["disk"]["free"] = host.index << 20
    found = merge_findings(compare(host_facts))
    assert sum(finding.state == "bad" for finding in found) == 100
    rows = in_short(found)
    assert sum(row.state == "bad" for row in rows) == 21
    assert "80 more findings of this kind" in rows[-2].text or "80 more findings of this kind" in table(found)


def test_three_hosts_with_the_same_finding_stay_three_lines():
    findings = [Finding(check="data", state="bad", text="gone", hosts=(name,)) for name in "abc"]
    assert merge_findings(findings) == findings
    more = Finding(check="data", state="bad", text="gone", hosts=("d",))
    assert merge_findings([*findings, more]) == [
        Finding(check="data", state="bad", text="gone", hosts=("a", "b", "c", "d"))
    ]
