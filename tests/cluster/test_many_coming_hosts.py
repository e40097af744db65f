"""Hosts that come back to an elastic job together: counted in plans, files, threads, questions and lines, never in seconds."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.growth import hosts as stand_ins
from mtrain.errors import SpecError
from mtrain.jobs.hosts import agent_processes
from mtrain.jobs.hosts.candidates import MAX_CHECKING, REFUSAL_S, ExpectedHosts
from mtrain.jobs.hosts.disconnection import Cause, Disconnection
from mtrain.jobs.hosts.elastic_hosts import CHECK_S, SETTLE_S
from tests.cluster.test_elastic_hosts import Time, bad, hosts, member, outcome, plan, running
from tests.cluster.test_many_hosts import SPEAKS, WAITS


def come(node: int, *, devices: int = 8, name: str = "10.0.0.{}"):
    made = replace(member(node), host=name.format(node + 1))
    made.hello = {"devices": devices, "hidden": False, "host": f"node{node}"}
    return made


class Plans:
    """Makes the requirements on all hosts, and counts how often."""

    def __init__(self, count: int, *, name: str = "10.0.0.{}") -> None:
        self.count, self.made, self.name = count, 0, name

    def __call__(self, members, come):
        self.made += 1
        if come.hello["devices"] == 0:
            raise SpecError("no device")
        everybody = [self.name.format(node + 1) for node in range(self.count)]
        return [{"node": node, "devices": come.hello["devices"], "names": everybody} for node in range(self.count)]


# ------------------------------------------------------------------------------------------------------------- plans, files
@pytest.mark.parametrize("count", [50, 200])
def test_hosts_that_are_alike_share_one_plan_of_all(count):
    plans = Plans(count)
    expected = ExpectedHosts(required=plans)
    members = {node: come(node) for node in range(count // 2)}
    for node in range(count // 2, count):
        assert expected.of(come(node), among=members)["node"] == node
    assert plans.made == 1
    for node in range(count // 2, count):
        devices = 4 if node % 2 else 8
        assert expected.of(come(node, devices=devices), among=members)["devices"] == devices
    assert plans.made == 2, "one for each kind"
    members[count // 2] = come(count // 2)
    assert expected.of(come(count - 1), among=members)["node"] == count - 1
    assert plans.made == 3, "the hosts that take part are others"


def test_a_host_without_a_plan_keeps_those_of_another_kind_out_of_nothing():
    plans = Plans(20)
    expected = ExpectedHosts(required=plans)
    for node in range(10, 20):
        with pytest.raises(SpecError, match="no device"):
            expected.of(come(node, devices=0), among={0: come(0)})
        assert expected.of(come(node), among={0: come(0)})["node"] == node
    assert plans.made == 2


def test_a_reason_against_a_plan_is_looked_at_again_since_it_may_pass():
    plans, clock = Plans(8), Time()
    expected = ExpectedHosts(required=plans, clock=clock)
    host = come(5, devices=0)
    for now in (0.0, REFUSAL_S - 1):
        clock.now = now
        with pytest.raises(SpecError, match="no device"):
            expected.of(host, among={0: come(0)})
    assert plans.made == 1, "hosts that come together ask once"
    clock.now, expected.required = REFUSAL_S, lambda members, member: Plans(8)(members, come(5))
    assert expected.of(host, among={0: come(0)})["node"] == 5


def test_a_host_is_asked_only_for_names_of_hosts_that_are_there():
    """It would wait for the name of a host that is lost."""
    known = ExpectedHosts(required=Plans(8, name="node{}"))
    required = known.of(come(5, name="node{}"), among={node: come(node, name="node{}") for node in (0, 2)})
    assert required["names"] == ["node1", "node3", "node6"]


def test_a_host_is_asked_for_the_address_by_which_a_launcher_knows_it():
    """The list of hosts has names. A host looks its own address up, and would be refused where that was not asked for."""
    known = ExpectedHosts(required=Plans(8, name="node{}"), address_of=lambda member: f"10.0.0.{member.node + 1}")
    members = {0: come(0, name="node{}")}
    for node in (1, 2):  # The second has the plan of the first.
        required = known.of(come(node, name="node{}"), among=members)
        assert required["address"] == f"10.0.0.{node + 1}"
        assert required["address"] in required["names"]


def test_a_host_that_has_another_address_than_before_is_asked_for_that():
    known = ExpectedHosts(required=Plans(8))
    known.of(come(1), among={0: come(0)})
    required = known.of(come(2, name="10.7.0.{}"), among={0: come(0)})
    assert (required["address"], required["names"]) == ("10.7.0.3", ["10.0.0.1", "10.7.0.3"])


class AtOnce:
    """A thread that has run when it was started."""

    def __init__(self, target, args, daemon) -> None:
        self.start = lambda: target(*args)


def job_of(count: int, *, monkeypatch, here: int = 1):
    """A job of ``count`` hosts of which ``here`` take part, and all others have come."""
    job = hosts(*(["step-00000004"] * here + [None] * (count - here)), saved=4, back_s=5.0)
    for node in range(here, count):
        job.gathering.coming[node] = job.members.pop(node)
    job._order, job._plan, job._candidates.clock = list(range(here)), plan(), Time()
    monkeypatch.setattr("mtrain.jobs.hosts.candidates.threading.Thread", AtOnce)
    return job


@pytest.mark.parametrize("count", [20, 100])
def test_the_files_of_an_attempt_are_written_and_packed_once_for_all_that_come(monkeypatch, count):
    job, written = job_of(count, monkeypatch=monkeypatch), []
    job.files = lambda plan: written.append(plan) or {"spec.json": "{}"}
    coming = list(job.gathering.coming.values())
    while len(job._candidates.fitting) < count - 1:
        job._candidates.look(job._absent())
    assert len(written) == 1
    assert all(sum(message["do"] == "prepare" for message in each.channel.sent) == 1 for each in coming)
    job._plan = plan()
    job._prepare(coming[0])
    assert len(written) == 2, "another attempt has other files"


def test_hosts_that_come_together_cause_one_new_start_and_wait_a_bounded_time_for_those_that_are_checked(monkeypatch):
    job = job_of(MAX_CHECKING + 8, monkeypatch=monkeypatch)
    clock = job._candidates.clock
    assert job._why_reform(running()) == "", f"{MAX_CHECKING} fit, and 7 wait for their turn"
    assert len(job._candidates.fitting) == MAX_CHECKING
    clock.now = SETTLE_S + 1
    assert job._why_reform(running()) == "", "others are being checked"
    clock.now = CHECK_S + 1
    assert f"({MAX_CHECKING} hosts) are here" in job._why_reform(running()), "those have kept them waiting long enough"
    job._looked_at = 0.0
    assert f"({MAX_CHECKING + 7} hosts) are here" in job._why_reform(running())


def test_a_job_that_waits_for_lost_hosts_asks_the_others_once_who_has_the_newest_checkpoint(monkeypatch):
    job = hosts(*["step-00000004"] * 6, fewest=2, saved=4)
    job.rejoin_s = 1.2
    monkeypatch.setattr("mtrain.jobs.hosts.elastic_hosts.AGAIN_S", 0.1)
    job.restore(plan(), outcome(ended=range(5), lost=(5,)))
    asked = [sum(message["do"] == "newest" for message in each.channel.sent) for each in job.members.values()]
    assert asked == [1] * 5


# -------------------------------------------------------------------------------------------------------------------- lines
def test_what_keeps_many_hosts_out_is_one_line_here_and_one_at_each_of_them(monkeypatch):
    job = job_of(25, monkeypatch=monkeypatch)
    job._candidates.findings_on = lambda member: [bad(member, "has no data" if member.node != 7 else "is odd")]
    coming = list(job.gathering.coming.values())
    for _ in range(3):
        job._candidates.look(job._absent())
    lines = job.shown.getvalue().splitlines()
    assert len(lines) == 1
    assert "(24 hosts) cannot take part at present" in lines[0]
    assert lines[0].count("has no data") == 1
    assert "10.0.0.8: is odd" in lines[0]
    told = [[m["text"] for m in each.channel.sent if "cannot take part" in m.get("text", "")] for each in coming]
    assert [len(each) for each in told] == [1] * 24
    assert len(job._candidates.problems()) == 2, "the last words of the job are as short"


def test_lost_hosts_are_let_go_beside_one_another(monkeypatch):
    job, calls = hosts(*["step-00000004"] * 9), []
    job.gathering.let_go = lambda nodes: calls.append(list(nodes))
    job.restore(plan(), outcome(ended=range(3), lost=range(3, 9)))
    assert [each for each in calls if each] == [[3, 4, 5, 6, 7, 8]]


# -------------------------------------------------------------------------------------------------------------- connections
@pytest.mark.job
def test_few_connect_at_once_and_dead_hosts_at_the_front_keep_none_behind_them_out(agents, monkeypatch):
    monkeypatch.setattr(agent_processes, "MAX_CONNECTING", 2)
    monkeypatch.setattr(agent_processes, "RETRY_S", 0.3)
    made, here, most = agents([WAITS, WAITS, *[SPEAKS] * 6]), {}, 0
    deadline = time.monotonic() + 60
    while len(here) < 6 and time.monotonic() < deadline:
        here |= made.arrivals([node for node in range(8) if node not in here])
        most = max(most, sum(node not in here for node in made._lines))
        time.sleep(0.02)
    assert sorted(here) == list(range(2, 8))
    assert most == 2


@pytest.mark.job
def test_connections_of_hosts_that_fell_silent_end_with_one_look_at_the_processes(agents, monkeypatch):
    stubborn = ["sh", "-c", f"{SPEAKS[-1].split(';')[0]}; trap '' TERM; sleep 600 & exec sleep 600"]
    made = agents([stubborn] * 12)
    members, _ = made.gather(range(12), timeout_s=60.0, stop=lambda: False)
    pids = [line.process.pid for line in made._lines.values()]
    below = [child for pid in pids for child in psutil.Process(pid).children()]
    for each in members.values():
        each.channel._lose(Disconnection(cause=Cause.SILENT, silent_s=20.0))
    looks, real = [], psutil.process_iter
    monkeypatch.setattr(psutil, "process_iter", lambda *args: looks.append(args) or real(*args))
    threads = threading.active_count()
    made.let_go(list(range(12)))
    assert len(looks) == 1
    assert threading.active_count() <= threads
    assert not any(psutil.pid_exists(pid) for pid in pids)
    _, alive = psutil.wait_procs(below, timeout=10.0)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


# --------------------------------------------------------------------------------------------------------------- all of it
@pytest.mark.job
def test_half_of_the_hosts_of_a_job_come_back_with_one_plan_for_them_and_one_new_start():
    """The leader is a real one; its hosts are played."""
    row = stand_ins.measure(40, ranks=1, quiet_s=0.5, elastic=True, lose=20)
    assert row["code"] == 143, row["console"]
    assert row["attempts"] == 3, "with all, without those, with all again"
    assert row["surveys"] == 2, "one for those that come, one for the new start"
    assert SimpleNamespace(**row).grown_messages <= 16 * 40
    assert row["threads"] <= MAX_CHECKING + 4
