"""The watch over an attempt: hosts are asked when something is found, one report is made of it, and a job that stays so ends."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.run import attempt as attempts
from mtrain.jobs.run.attempt import Attempt, Limits
from mtrain.jobs.run.supervisor import explain
from mtrain.jobs.watch.looks import INTERVAL_S
from mtrain.jobs.watch.rules import Times, Watching
from mtrain.records.console import Quiet
from mtrain.system.processes import Requests

WAITS = {"kind": "waits", "what": "all_reduce", "where": "train.py:41", "why": "", "children": []}
SLEEPS = {**WAITS, "kind": "runs", "what": "", "where": "train.py:12"}
UNKNOWN = {**WAITS, "kind": "unknown", "what": "", "where": "", "why": "it is stopped by a signal"}


def idle(rank: int, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "pid": 100 + rank, "state": "S", "idle": True, **more}


def stopped(rank: int) -> dict[str, Any]:
    return idle(rank, state="T", stopped=100 + rank, name="python")


class Clock:
    """Time that passes while the leader sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.5)


class Host:
    """An agent that sees, each 5 s, what a test has planned, and answers where its ranks are."""

    lost, silent_s = None, 0.0

    def __init__(
        self, clock: Clock, phases: list[tuple[float, list[dict[str, Any]]]], places: dict[int, Any], **more: Any
    ) -> None:
        self.clock, self.phases, self.places = clock, phases, places
        self.began = self.looked_at = clock.now
        self.sent: list[dict[str, Any]] = []
        self.inbox: list[dict[str, Any]] = []
        self.events: dict[float, dict[str, Any]] = more.get("events", {})
        self.missing = more.get("missing", [])
        self.silence_s = 0.0

    def send(self, message: Any) -> None:
        self.sent.append(dict(message))
        if message["do"] == "places":
            places = {str(rank): place for rank, place in self.places.items()}
            self.inbox.append({"event": "places", "ask": message["ask"], "places": places, "missing": self.missing})
        if message["do"] == "end":
            self.inbox.append({"event": "ended", "status": -9, "log": "", "logs": {}, "ended_here": True})

    def receive(self) -> list[dict[str, Any]]:
        messages, self.inbox = self.inbox, []
        since = self.clock.now - self.began
        for at in [at for at in self.events if at <= since]:
            messages.append(self.events.pop(at))
        if self.clock.now - self.looked_at >= INTERVAL_S:
            self.looked_at = self.clock.now
            looks = next((looks for until, looks in self.phases if since <= until), [])
            messages.append(
                {"event": "look", "span_s": INTERVAL_S, "paused": False, "grew": False, "ranks": looks, "locks": []}
            )
        return messages

    def of(self, verb: str) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["do"] == verb]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(attempts.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(attempts.time, "sleep", clock.sleep)
    monkeypatch.setattr(attempts.time, "time", lambda: clock.now + 1_700_000_000)
    return clock


def run(
    tmp_path: Path,
    clock: Clock,
    hosts: list[Host],
    *,
    watching: Watching | None,
    ends_s: float = 200.0,
    deaths: Any = (),
):
    """Return the outcome of an attempt on hosts of two ranks each, and what was shown; it is ended after ``ends_s``."""
    shown = io.StringIO()
    launcher = SimpleNamespace(
        agent=True, forwards_signals=True, deaths=lambda log, status: list(deaths), own_logs=lambda command: None
    )
    names = [f"10.0.0.{number}" for number in range(1, len(hosts) + 1)]
    plan: Any = SimpleNamespace(
        run_dir=tmp_path, log_dir=None, commands=[SimpleNamespace(host=name, argv=[], env={}) for name in names],
        launcher=launcher, hosts=[SimpleNamespace(slots=2, address=name) for name in names], log_bytes=0,
        first_rank=lambda node: 2 * node, knows_mtrain=True, saves=True, shown="none", watching=watching,
    )  # fmt: skip
    for host in hosts:
        host.events[ends_s] = {"event": "ended", "status": 0, "log": "", "logs": {}}
    members = {
        node: Member(node=node, host=names[node], channel=host, hello={})  # type: ignore[arg-type]
        for node, host in enumerate(hosts)
    }
    outcome = Attempt(
        plan=plan,
        members=members,
        display=Quiet(shown),
        requests=Requests(),
        limits=Limits(silence_s=9.0, poll_s=0.5),
    ).run()
    return outcome, shown.getvalue()


WATCHED = Watching(end_s=120.0)


def test_a_stopped_rank_of_another_host_is_named_once_and_the_job_ends_in_time(tmp_path, clock):
    hosts = [
        Host(clock, [(1e9, [idle(0), idle(1)])], {0: WAITS, 1: WAITS}),
        Host(clock, [(1e9, [idle(2), stopped(3)])], {2: WAITS, 3: UNKNOWN}),
    ]
    outcome, shown = run(tmp_path, clock, hosts, watching=WATCHED, ends_s=900.0)
    assert shown.count("rank 3 (host 10.0.0.2) has been stopped by a signal since") == 1
    assert "ranks 0 to 2 wait for it in all_reduce at train.py:41" in shown
    assert [len(host.of("places")) for host in hosts] == [1, 1]
    assert [message["report"]["ranks"] for host in hosts for message in host.of("hang")] == [[3], [3]]
    assert 120 <= clock.now - 1000.0 <= 150
    verdict = explain(outcome, Requests(), newest=lambda: None)
    assert (verdict.code, verdict.from_outside) == (1, True)
    assert verdict.headline.startswith("rank 3 (host 10.0.0.2) has been stopped by a signal since")
    assert verdict.headline.endswith("ended after 120 s (cluster.hangs.end_s)")
    assert outcome.hung_nodes() == [1]


def test_ranks_that_go_on_are_said_to_and_nothing_is_ended(tmp_path, clock):
    host = Host(clock, [(60, [idle(0), stopped(1)]), (1e9, [])], {0: WAITS, 1: UNKNOWN})
    outcome, shown = run(tmp_path, clock, [host], watching=WATCHED)
    assert "rank 1 (host 10.0.0.1) has been stopped" in shown
    assert "the ranks go on" in shown
    assert [message["report"].get("over") for message in host.of("hang")] == [None, True]
    assert outcome.ok
    assert outcome.hang is None


def test_a_job_that_is_never_ended_goes_on_and_is_reported_once(tmp_path, clock):
    host = Host(clock, [(1e9, [idle(0), idle(1)])], {0: WAITS, 1: SLEEPS})
    outcome, shown = run(tmp_path, clock, [host], watching=Watching(end_s=None), ends_s=2000.0)
    assert shown.count("nothing moves since") == 1
    assert "rank 1 (host 10.0.0.1) does nothing at train.py:12; rank 0 (host 10.0.0.1) waits for it" in shown
    assert outcome.ok


def test_a_long_computation_before_a_hang_does_not_shorten_the_time_after_which_the_job_is_ended(tmp_path, clock):
    phases = [(400, [idle(0)]), (460, [idle(0), stopped(1)]), (1e9, [])]
    host = Host(clock, phases, {0: WAITS, 1: SLEEPS})
    outcome, shown = run(tmp_path, clock, [host], watching=WATCHED, ends_s=600.0)
    assert "no progress for" in shown
    assert "rank 1 (host 10.0.0.1) has been stopped" in shown
    assert outcome.hang is None
    assert outcome.ok


def test_a_job_that_is_not_watched_says_nothing(tmp_path, clock):
    host = Host(clock, [(1e9, [idle(0), stopped(1)])], {})
    outcome, shown = run(tmp_path, clock, [host], watching=None)
    assert (outcome.ok, shown) == (True, "")


def test_a_host_that_does_not_answer_is_not_waited_for_for_ever(tmp_path, clock):
    hosts = [
        Host(clock, [(1e9, [idle(0), idle(1)])], {0: WAITS, 1: WAITS}),
        Host(clock, [(1e9, [idle(2), stopped(3)])], {}),
    ]
    hosts[1].send = lambda message: None  # type: ignore[method-assign]
    _, shown = run(tmp_path, clock, hosts, watching=Watching(end_s=None), ends_s=100.0)
    assert "rank 3 (host 10.0.0.2) has been stopped" in shown
    assert "rank 2 (host 10.0.0.2) cannot be asked where it is (its host has not answered)" in shown


TIMED_OUT = {
    "event": "failure",
    "age_s": 0.0,
    "failure": {"rank": 0, "error": "RuntimeError: Timed out waiting 20000ms for recv"},
}
KILLED = {"event": "ended", "status": 1, "log": "", "logs": {}}


def fails(failure: dict[str, Any], at: float) -> dict[float, dict[str, Any]]:
    return {at: {**failure, "failure": {**failure["failure"]}}, at + 1: dict(KILLED)}


def test_the_verdict_names_the_rank_that_did_not_come_and_not_the_one_whose_patience_ended(tmp_path, clock):
    """The others are ended at once when rank 0 has failed; what was seen before counts."""
    host = Host(clock, [(21, [idle(0), stopped(1)]), (1e9, [])], {0: WAITS, 1: UNKNOWN}, events=fails(TIMED_OUT, 20.5))
    outcome, _ = run(tmp_path, clock, [host], watching=WATCHED)
    verdict = explain(outcome, Requests(), newest=lambda: None)
    assert verdict.headline.startswith("rank 1 (host 10.0.0.1) has been stopped by a signal since")
    assert "rank 0 on 10.0.0.1 has waited in vain, and failed: RuntimeError: Timed out" in verdict.headline
    assert verdict.text.splitlines()[-1] == f"error: {verdict.headline}"
    assert verdict.from_outside


def test_what_ranks_look_like_while_they_are_ended_does_not_count(tmp_path, clock):
    """Their starter ends the stopped rank while the command goes on; it has not ended by itself."""
    events = fails(TIMED_OUT, 20.5)
    events[40.0] = events.pop(21.5)
    host = Host(
        clock, [(21, [idle(0), stopped(1)]), (1e9, [idle(0), idle(1, state="")])], {0: WAITS, 1: UNKNOWN}, events=events
    )
    outcome, _ = run(tmp_path, clock, [host], watching=WATCHED)
    assert outcome.judge().headline.startswith("rank 1 (host 10.0.0.1) has been stopped by a signal since")


def test_ranks_are_asked_before_they_are_ended(tmp_path, clock):
    host = Host(clock, [(1e9, [idle(0), idle(1)])], {1: SLEEPS}, events=fails(TIMED_OUT, 20.5))
    outcome, _ = run(tmp_path, clock, [host], watching=WATCHED)
    assert len(host.of("places")) == 1
    verdict = explain(outcome, Requests(), newest=lambda: None)
    assert verdict.headline.startswith(
        "rank 1 (host 10.0.0.1) does nothing at train.py:12; rank 0 on 10.0.0.1 has waited in vain"
    )


def test_ranks_are_asked_early_where_their_library_gives_up(tmp_path, clock):
    """When it has given up, the ranks end at once, and nobody could be asked any more."""
    early = Watching(times=Times(asked_s=15.0))
    host = Host(clock, [(1e9, [idle(0), idle(1)])], {0: WAITS, 1: SLEEPS}, events=fails(TIMED_OUT, 30.5))
    outcome, shown = run(tmp_path, clock, [host], watching=early)
    assert len(host.of("places")) == 1
    assert shown == "", "nothing is said of a pause that may end"
    assert "rank 1 (host 10.0.0.1) does nothing at train.py:12" in outcome.judge().headline


def test_what_horovod_says_of_missing_ranks_is_used(tmp_path, clock):
    failure = {**TIMED_OUT, "failure": {"rank": 0, "error": "HorovodInternalError: Horovod has been shut down"}}
    events = fails(failure, 33.0)
    events[34.0]["missing"] = [1]
    outcome, _ = run(tmp_path, clock, [Host(clock, [], {}, events=events)], watching=WATCHED)
    assert outcome.judge().headline.startswith(
        "rank 1 did not come, as Horovod says; rank 0 on 10.0.0.1 has waited in vain"
    )


@pytest.mark.parametrize(
    ("file", "is_named"),
    [
        ("/venv/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/venv/site-packages/torch/autograd/graph.py", True),
        ("/venv/site-packages/requests/adapters.py", False),
        ("/venv/site-packages/torch/utils/data/dataloader.py", False),
    ],
)
def test_a_download_that_times_out_is_the_fault_of_no_other_rank(tmp_path, clock, file, is_named):
    traceback = f'  File "/job/train.py", line 7, in <module>\n    get()\n  File "{file}", line 5, in get\n'
    failure = {"rank": 0, "error": "ReadTimeout: timed out", "traceback": f"{traceback}ReadTimeout: timed out\n"}
    host = Host(clock, [], {0: WAITS, 1: SLEEPS}, events=fails({**TIMED_OUT, "failure": failure}, 20.5))
    outcome, _ = run(tmp_path, clock, [host], watching=WATCHED)
    assert (outcome.hang is not None) == is_named


GAVE_UP = "  epoch 1\n  the exchange of gradients failed: another rank has ended, or is unreachable\n  Aborted"
EARLY = Watching(times=Times(asked_s=15.0))


@pytest.mark.parametrize("code", [1, -6], ids=["exits", "aborts"])
def test_a_rank_that_spins_is_named_where_the_one_that_waited_ended_without_a_failure_file(tmp_path, clock, code):
    """Paddle's gloo ends a rank in C++; then its launcher ends the others, and what they look like is no cause."""
    events = {40.0: {**KILLED, "logs": {"0": GAVE_UP}}}
    phases = [(33.0, [idle(0)]), (1e9, [idle(0, state=""), idle(1, state="")])]
    host = Host(clock, phases, {0: {**WAITS, "kind": "backward"}, 1: SLEEPS}, events=events)
    outcome, shown = run(tmp_path, clock, [host], watching=EARLY, deaths=[(0, code)])
    assert shown == ""
    assert len(host.of("places")) == 1, "asked before the ranks end"
    assert outcome.judge().headline == (
        "rank 1 (host 10.0.0.1) computes at train.py:12; rank 0 on 10.0.0.1 has waited in vain, and failed: "
        "the exchange of gradients failed: another rank has ended, or is unreachable"
    )
    assert outcome.hung_nodes() == [0]


def test_a_stopped_rank_is_named_where_the_one_that_waited_ended_without_a_failure_file(tmp_path, clock):
    phases = [(33.0, [idle(0), stopped(1)]), (1e9, [idle(0, state=""), idle(1, state="")])]
    host = Host(clock, phases, {0: WAITS, 1: UNKNOWN}, events={40.0: {**KILLED, "logs": {"0": GAVE_UP}}})
    outcome, _ = run(tmp_path, clock, [host], watching=EARLY, deaths=[(0, 1)])
    assert outcome.judge().headline.startswith("rank 1 (host 10.0.0.1) has been stopped by a signal since")


@pytest.mark.parametrize(
    ("deaths", "logs", "named"),
    [
        ([(0, 1)], {"0": "  MemoryError"}, "rank 0 on 10.0.0.1 ended with exit code 1"),
        ([(1, 7)], {"0": GAVE_UP}, "rank 1 on 10.0.0.1 ended with exit code 7"),
        ([(0, 1), (1, -9)], {"0": GAVE_UP}, "rank 1 on 10.0.0.1 was ended by signal 9 (SIGKILL)"),
        ([(0, 1), (1, 7)], {"0": GAVE_UP}, "rank 0 on 10.0.0.1 ended with exit code 1"),
    ],
    ids=["no time-out", "the other alone", "the other was killed", "the other as well"],
)
def test_a_rank_that_ended_by_itself_is_not_said_to_hang(tmp_path, clock, deaths, logs, named):
    host = Host(clock, [(1e9, [idle(0)])], {0: WAITS, 1: SLEEPS}, events={40.0: {**KILLED, "logs": logs}})
    outcome, _ = run(tmp_path, clock, [host], watching=EARLY, deaths=deaths)
    assert outcome.hang is None
    assert outcome.judge().headline.startswith(named)


@pytest.mark.parametrize(
    ("error", "looks", "places"),
    [
        ("ValueError: the seventh image is upside down", [idle(0), stopped(1)], {}),
        ("RuntimeError: Timed out waiting", [], {0: WAITS, 1: WAITS}),
        ("RuntimeError: Timed out waiting", [idle(0), idle(1)], {0: WAITS, 1: WAITS}),
        ("RuntimeError: Timed out waiting", [idle(0), idle(1, state="")], {}),
    ],
    ids=["no time-out", "all wait", "all wait idly", "the other has ended"],
)
def test_a_failure_of_another_kind_keeps_its_verdict(tmp_path, clock, error, looks, places):
    failure = {**TIMED_OUT, "failure": {"rank": 0, "error": error}}
    outcome, _ = run(
        tmp_path, clock, [Host(clock, [(1e9, looks)], places, events=fails(failure, 20.5))], watching=WATCHED
    )
    assert outcome.hang is None
    assert outcome.judge().headline.startswith("rank 0 on 10.0.0.1 failed first")
