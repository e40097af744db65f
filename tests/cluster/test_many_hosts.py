"""What a leader of many hosts uses: counted in threads, files, messages and steps, never in seconds."""

import os
import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import mtrain
from mtrain.errors import UsageError
from mtrain.jobs.hosts import agent_processes
from mtrain.jobs.hosts.disconnection import Cause, Disconnection
from mtrain.jobs.run.attempt import note_request
from mtrain.jobs.run.outcome import Loss, Outcome
from mtrain.system import processes
from mtrain.system.processes import Requests

HELLO = f'{{"event": "hello", "version": "{mtrain.__version__}", "host": "node"}}'
SPEAKS = ["sh", "-c", f"echo '{HELLO}'; cat >/dev/null"]
WAITS = ["sh", "-c", "exec sleep 600"]


def gather(gathering, count, *, timeout_s=60.0):
    return gathering.gather(range(count), timeout_s=timeout_s, stop=lambda: False)


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.job
def test_a_host_more_takes_three_files_and_no_thread(agents):
    files, threads = open_count(), threading.active_count()
    members, findings = gather(agents([SPEAKS] * 40), 40)
    assert list(members) == list(range(40)), "in the order of the hosts, whoever spoke first"
    assert findings == []
    assert open_count() - files <= 3 * 40 + 4
    assert threading.active_count() - threads == 1


@pytest.mark.job
def test_hosts_that_never_answer_hold_their_own_places_up_and_are_named(agents, monkeypatch):
    monkeypatch.setattr(agent_processes, "MAX_CONNECTING", 4)
    opened, most = [], 0
    real = agent_processes.open_line

    def counted(*args, **kwargs):
        nonlocal most
        opened.append(real(*args, **kwargs))
        most = max(most, sum(not line.channel.spoken for line in opened))
        return opened[-1]

    monkeypatch.setattr(agent_processes, "open_line", counted)
    dead = (0, 2)
    members, findings = gather(agents([WAITS if number in dead else SPEAKS for number in range(16)]), 16, timeout_s=8.0)
    assert [finding.hosts for finding in findings] == [("10.9.0.1",), ("10.9.0.3",)]
    assert "has said nothing for 8 s" in findings[0].text
    assert sorted(members) == [number for number in range(16) if number not in dead]
    assert most <= 4


def test_a_limit_of_open_files_is_raised_as_far_as_it_may_be_and_else_named(monkeypatch):
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.__setitem__(slice(None), pair))
    processes.allow_open_files(3 * 100, what="100 hosts")
    assert limits == [1024, 4096]
    processes.allow_open_files(3 * 1000, what="1000 hosts")
    assert limits == [3256, 4096]
    with pytest.raises(
        UsageError, match=r"2000 hosts: 6256 files must be open at once, and this machine allows.* 4096"
    ):
        processes.allow_open_files(3 * 2000, what="2000 hosts")


def test_a_request_to_a_hundred_hosts_at_once_names_the_first_ones():
    requests, notes = Requests(), []
    display = SimpleNamespace(note=notes.append)
    for times in (1, 2):
        for node in range(100):
            message = {"signal": int(signal.SIGTERM), "times": times}
            note_request(message, Labelled(node), requests, display)
    assert notes == [*(f"node{node} was asked to end the job" for node in range(3)), "so were other hosts"]
    assert requests.count == 2


class Counted:
    """A host of a plan that counts how often its number of ranks is read."""

    reads = 0

    @property
    def slots(self) -> int:
        Counted.reads += 1
        return 8


class Labelled:
    def __init__(self, node: int) -> None:
        self.node, self.label = node, f"node{node}"


def lost_one_of(count: int) -> Outcome:
    """The outcome where one host was lost, upon which every rank of all others failed."""
    plan = SimpleNamespace(
        hosts=[Counted() for _ in range(count)],
        run_dir=Path("/runs/one"),
        log_dir=None,
        first_rank=lambda node: sum(host.slots for host in plan.hosts[:node]),
        launcher=SimpleNamespace(deaths=lambda log, status: ()),
    )
    outcome = Outcome(plan=plan, members={node: Labelled(node) for node in range(count)})
    gone = count // 2
    outcome.lost[gone] = Loss(at=10.0, why=Disconnection(cause=Cause.CLOSED_THERE), last_heard=0.0)
    outcome.failures += [
        {"rank": rank, "when": 10.0 + rank / 1e6, "error": "reset by peer"}
        for rank in range(8 * count)
        if rank // 8 != gone
    ]
    return outcome


def test_the_verdict_on_one_lost_host_takes_steps_in_proportion_to_the_hosts():
    steps = {}
    for count in (50, 200):
        Counted.reads = 0
        verdict = lost_one_of(count).judge()
        steps[count] = Counted.reads
        assert verdict.headline == f"host node{count // 2} is lost: the connection was closed"
        assert f"ranks {8 * (count // 2)} to {8 * (count // 2) + 7} ran there" in verdict.text
        assert "then rank 0 on node0 failed: reset by peer" in verdict.text
    assert steps[200] <= 20 * 200
    assert steps[200] <= 4.2 * steps[50]


def test_a_host_whose_rank_failed_before_it_was_lost_is_not_the_cause():
    outcome = lost_one_of(50)
    outcome.failures.append({"rank": 8 * 25, "when": 9.0, "error": "on fire"})
    outcome.lost[7] = Loss(at=11.0, why=Disconnection(cause=Cause.CLOSED_THERE), last_heard=0.0)
    assert outcome.judge().headline == "rank 200 on node25 failed first: on fire"
