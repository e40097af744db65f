"""Which hosts an elastic job goes on with, and when it does not."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.errors import LaunchError
from mtrain.jobs.hosts import elastic_hosts
from mtrain.jobs.hosts.elastic_hosts import ElasticHosts
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.preflight.findings import Finding
from mtrain.jobs.run.attempt import Attempt, Limits
from mtrain.jobs.run.supervisor import Result
from mtrain.records.console import Quiet
from mtrain.system.processes import Requests

DONE = Result(code=0, text="")


class Agent:
    """The channel to an agent that answers each request at once."""

    def __init__(self, checkpoint: str | None = None) -> None:
        self.checkpoint, self.lost, self.silence_s, self.silent_s = checkpoint, None, 1.0, 0.0
        self.sent: list[dict[str, Any]] = []
        self.closed = False
        self.warnings: list[str] = []

    def send(self, message) -> None:
        self.sent.append(message)

    def receive(self) -> list[Any]:
        return []

    def ask(self, verb: str, **fields: Any) -> int:
        self.sent.append({"do": verb, **fields})
        return 0

    def answer(self, number: int, **limits: Any) -> dict[str, Any]:
        newest = {"checkpoint": self.checkpoint, "warnings": self.warnings}
        return newest if self.sent[-1]["do"] == "newest" else {}

    def close(self, **limits: Any) -> None:
        self.closed = True


class Gathering:
    """Hosts that arrive when a test says so."""

    forwards = True

    def __init__(self) -> None:
        self.coming: dict[int, Member] = {}
        self.gone: list[int] = []
        self.left: list[tuple[int, float]] = []

    def arrivals(self, nodes):
        return {node: self.coming.pop(node) for node in list(self.coming) if node in nodes}

    def leave_alone(self, node: int, *, seconds: float) -> None:
        self.left.append((node, seconds))

    def let_go(self, nodes) -> None:
        self.gone += nodes


def member(node: int, checkpoint: str | None = None) -> Member:
    return Member(node=node, host=f"10.0.0.{node + 1}", channel=Agent(checkpoint), hello={})  # type: ignore[arg-type]


def bad(member: Member, text: str) -> Finding:
    return Finding(check="data", state="bad", hosts=(member.label,), text=text)


def plan() -> Any:
    return SimpleNamespace(run_dir=Path("runs/x"), log_dir=None, resume=None, metrics=None)


def outcome(*, ended=(), lost=(), reformed="", hung=()) -> Any:
    verdict = SimpleNamespace(headline="host 10.0.0.3 is lost")
    return SimpleNamespace(
        ended=dict.fromkeys(ended), lost=dict.fromkeys(lost), reformed=reformed, judge=lambda: verdict,
        hung_nodes=lambda: list(hung),
    )  # fmt: skip


def running(*, started_s_ago: float | None = 0.0, updated: bool = True) -> Any:
    """The outcome so far of an attempt that runs."""
    began = None if started_s_ago is None else elastic_hosts.time.monotonic() - started_s_ago
    return SimpleNamespace(started_at=began, has_updated=updated)


def hosts(*checkpoints: str | None, fewest: int = 1, saved: int = -1, back_s: float = 0.3) -> Any:
    """An elastic job on as many hosts as checkpoints are given: the newest one that each host has."""
    shown = io.StringIO()
    made = ElasticHosts(
        members={node: member(node, checkpoint) for node, checkpoint in enumerate(checkpoints)},
        gathering=Gathering(),
        display=Quiet(shown),
        requests=Requests(),
        files=lambda plan: {},
        replan=lambda plan, checkpoint, nodes: SimpleNamespace(nodes=list(nodes), checkpoint=checkpoint),
        forwarded={},
        limits=Limits(silence_s=1.0),
        back_s=back_s,
        all_nodes=range(len(checkpoints)),
        names=[f"10.0.0.{node + 1}" for node in range(len(checkpoints))],
        fewest=fewest,
        rejoin_s=0.0,
        findings_on=lambda member: [],
    )
    made._saved, made.shown = saved, shown  # type: ignore[attr-defined]
    return made


def attempted(tmp_path: Path, *records: dict[str, Any]) -> Any:
    """The outcome of an attempt whose rank 0 writes these records, and whose command then ends."""
    agent = Agent()
    ended = {"event": "ended", "status": 1, "log": "", "logs": {}}
    inbox = [{"event": "record", "record": record} for record in records] + [ended]
    agent.receive = lambda: [inbox.pop(0)] if inbox else []  # type: ignore[method-assign]
    launcher = SimpleNamespace(
        agent=True, forwards_signals=True, deaths=lambda log, status: [], own_logs=lambda command: []
    )
    command = SimpleNamespace(host="10.0.0.1", argv=[], env={})
    attempt_plan: Any = SimpleNamespace(
        run_dir=tmp_path, commands=[command], launcher=launcher, hosts=[SimpleNamespace(slots=1)], log_bytes=0,
        first_rank=lambda node: 0, knows_mtrain=True, saves=True, shown="first", watching=None,
    )  # fmt: skip
    return Attempt(
        plan=attempt_plan,
        members={0: Member(node=0, host="10.0.0.1", channel=agent, hello={})},  # type: ignore[arg-type]
        display=Quiet(io.StringIO()),
        requests=Requests(),
        limits=Limits(silence_s=9.0, poll_s=0.0),
    ).run()


@pytest.mark.parametrize(("reason", "saved"), [(None, 6), ("failed", 6), ("done", 12), ("interrupted", 12)], ids=str)
def test_a_save_that_was_begun_counts_once_the_ranks_say_how_they_ended(tmp_path: Path, reason: str, saved: int):
    records: list[dict[str, Any]] = [{"kind": "checkpoint", "update": update, "why": "due"} for update in (6, 12)]
    end = [] if reason is None else [{"kind": "end", "reason": reason}]
    assert attempted(tmp_path, *records, *end).saved == saved


def test_a_lost_host_costs_no_restart_and_the_job_goes_on_with_the_others():
    job = hosts("step-00000004", None, None)
    lost = outcome(ended=(0, 1), lost=(2,))
    assert job.change(lost) == "host 10.0.0.3 is lost"
    job.restore(plan(), lost)
    assert job.next_plan(plan(), job.newest()).nodes == [0, 1]
    assert job.gathering.gone == [2]


def test_a_rank_that_fails_on_a_host_that_is_there_is_a_failure():
    assert hosts(None, None).change(outcome(ended=(0, 1))) == ""


def test_a_host_that_is_silent_and_only_suspected_is_lost_too():
    assert hosts(None, None, None).change(outcome(ended=(0, 1))) != ""


def test_the_host_with_the_newest_checkpoint_has_rank_0():
    job = hosts("step-00000004", "step-00000008", "step-00000008", saved=8)
    newest = job.newest()
    assert newest.name == "step-00000008"
    assert job.next_plan(plan(), newest).nodes == [1, 2, 0]


def test_a_job_whose_newest_checkpoint_is_on_the_lost_host_ends_instead_of_beginning_anew():
    job = hosts("step-00000008", None, None, saved=8)
    with pytest.raises(LaunchError, match=r"newest checkpoint, of update 8, is on none of the 2 hosts.*--resume"):
        job.restore(plan(), outcome(ended=(1, 2), lost=(0,)))


def test_the_host_with_the_newest_checkpoint_is_awaited():
    job = hosts("step-00000008", None, saved=8, back_s=20.0)
    job.gathering.coming[0] = member(0, "step-00000008")
    job.restore(plan(), outcome(ended=(1,), lost=(0,)))
    assert job.next_plan(plan(), job.newest()).nodes == [0, 1]


def test_too_few_hosts_end_the_job_after_a_while_with_those_that_are_missing():
    job = hosts("step-00000004", None, None, fewest=2)
    with pytest.raises(
        LaunchError, match=r"1 of its hosts are there.*needs 2 \(cluster.min_nodes\); missing: 10.0.0.2, 10.0.0.3"
    ):
        job.restore(plan(), outcome(ended=(0,), lost=(1, 2)))


def test_a_host_that_was_asked_to_end_leaves_if_enough_remain():
    job = hosts("step-00000004", None, None, fewest=2)
    leaving = job.members[2].channel
    assert job._leaves(2)
    assert job._why_reform(running()) == "10.0.0.3 is asked to end, and leaves"
    assert not job._leaves(1), "two must stay"
    job.restore(plan(), outcome(ended=(0, 1, 2), reformed="leaves"))
    assert leaving.sent[-1]["do"] == "bye"
    assert leaving.sent[-1]["code"] == 143
    assert job.next_plan(plan(), job.newest()).nodes == [0, 1]
    assert job.gathering.left == [(2, 120.0)], "it is not fetched back at once"


def test_a_host_that_comes_is_checked_and_then_taken(monkeypatch):
    job = hosts("step-00000004", None)
    job.members.pop(1)
    job._order, job._plan = [0], plan()
    job.gathering.coming[1] = member(1)
    monkeypatch.setattr("mtrain.jobs.hosts.candidates.threading.Thread", _AtOnce)
    assert job._why_reform(running()) == "10.0.0.2 is here"
    job.restore(plan(), outcome(ended=(0,), reformed="here"))
    assert job.next_plan(plan(), job.newest()).nodes == [0, 1]


def test_a_host_that_comes_while_ranks_start_lets_that_start_reach_its_first_update(monkeypatch):
    job = hosts("step-00000004", None, None, fewest=2)
    job.members.pop(1)
    job._order, job._plan = [0, 2], plan()
    job.gathering.coming[1] = member(1)
    monkeypatch.setattr("mtrain.jobs.hosts.candidates.threading.Thread", _AtOnce)
    assert job._why_reform(running(started_s_ago=None, updated=False)) == ""
    assert job._why_reform(running(started_s_ago=1.0, updated=False)) == ""
    assert job._candidates.fitting == [1], "it is checked meanwhile"
    assert job._why_reform(running(started_s_ago=1.0)) == "10.0.0.2 is here"
    # Of updates that are not recorded one by one, the first is not waited for.
    assert job._why_reform(running(started_s_ago=elastic_hosts.PUT_OFF_S + 1, updated=False)) == "10.0.0.2 is here"


class Ranks(Agent):
    """The channel to a host whose ranks have told ``records``, and end when they are asked to."""

    def __init__(self, *records: dict[str, Any]) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = [{"event": "record", "record": record} for record in records]

    def send(self, message) -> None:
        super().send(message)
        if message["do"] == "stop":
            self.events.append({"event": "ended", "status": 1, "log": ""})

    def receive(self) -> list[Any]:
        taken, self.events = self.events, []
        return taken


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((), "10.0.0.2 is here: starting again, since nothing was made yet, with these hosts"),
        (({"kind": "start"},), "10.0.0.2 is here: saving, to go on with these hosts"),
    ],
)
def test_saving_is_said_only_where_ranks_have_begun_to_train(tmp_path, records, said):
    shown, seen = io.StringIO(), []

    def reform(outcome) -> str:
        seen.append((outcome.started_at is not None, outcome.has_updated))
        return "10.0.0.2 is here"

    launcher = SimpleNamespace(
        agent=True, forwards_signals=True, own_logs=lambda command: None, deaths=lambda log, status: []
    )
    command = SimpleNamespace(host="10.0.0.1", argv=(), env={})
    ranks = SimpleNamespace(
        run_dir=tmp_path, commands=[command], launcher=launcher, first_rank=lambda node: 0, log_bytes=None,
        hosts=[SimpleNamespace(slots=1)], knows_mtrain=True, saves=True, shown="first", watching=None,
    )  # fmt: skip
    Attempt(
        plan=ranks,  # type: ignore[arg-type]
        members={0: Member(node=0, host="10.0.0.1", channel=Ranks(*records), hello={})},  # type: ignore[arg-type]
        display=Quiet(shown),
        requests=Requests(),
        limits=Limits(silence_s=1.0, poll_s=0.0),
        reform=reform,
    ).run()
    assert said in shown.getvalue()
    assert seen == [(bool(records), False)]


def test_a_host_whose_ranks_hang_again_is_left_out():
    job = hosts("step-00000004", "step-00000004", None, fewest=2)
    hung = outcome(ended=(0, 1, 2), hung=(1,))
    assert job.change(hung) == "", "the first time, the job starts again as it was"
    assert job.change(outcome(ended=(0, 1, 2), hung=(2,))) == ""
    assert job.change(hung) == "10.0.0.2 is left out: its ranks have hung 2 times"
    left = job.members[1].channel
    job.restore(plan(), hung)
    assert sorted(job.members) == [0, 2]
    assert [message["do"] for message in left.sent][-1:] == ["bye"]
    assert job.gathering.left == [(1, elastic_hosts.HUNG_S)]


def test_a_host_that_leaves_while_others_fail_is_not_said_to_hang():
    job = hosts("step-00000004", "step-00000004", None, fewest=2)
    assert job._leaves(2)
    assert job.change(outcome(ended=(0, 1, 2))) == ""


def test_a_host_without_which_the_job_cannot_go_on_stays_however_often_it_hangs():
    job = hosts("step-00000004", "step-00000004", fewest=2)
    assert [job.change(outcome(ended=(0, 1), hung=(1,))) for _ in range(4)] == [""] * 4
    assert sorted(job.members) == [0, 1]


def test_a_host_that_is_to_end_leaves_a_start_at_once():
    job = hosts("step-00000004", None, None, fewest=2)
    assert job._leaves(2)
    assert "leaves" in job._why_reform(running(started_s_ago=None, updated=False))


def test_a_host_that_comes_just_before_the_end_is_told_of_it(monkeypatch):
    job = hosts("step-00000004", None)
    job.members.pop(1)
    job.gathering.coming[1] = member(1)
    monkeypatch.setattr("mtrain.jobs.hosts.candidates.threading.Thread", _AtOnce)
    job._plan = plan()
    assert job._why_reform(running()) == "10.0.0.2 is here"
    monkeypatch.setattr("mtrain.jobs.hosts.connected_hosts.supervise", lambda *arguments, **named: DONE)
    assert job.run(plan()) is DONE
    assert sorted(job.members) == [0, 1], "the leader bids farewell to these"


def test_a_host_that_comes_and_does_not_fit_disturbs_nothing(monkeypatch):
    job = hosts("step-00000004", None)
    job.members.pop(1)
    job._order, job._plan = [0], plan()
    job.gathering.coming[1] = member(1)
    job._candidates.findings_on = lambda member: [bad(member, "has no data")]
    monkeypatch.setattr("mtrain.jobs.hosts.candidates.threading.Thread", _AtOnce)
    assert job._why_reform(running()) == ""
    assert job._why_reform(running()) == ""
    assert "10.0.0.2 cannot take part at present: data 10.0.0.2: has no data" in job.shown.getvalue()


class _AtOnce:
    """A thread that has run when it was started."""

    def __init__(self, target, args, daemon) -> None:
        self._run = lambda: target(*args)

    def start(self) -> None:
        self._run()


# ------------------------------------------------------------------------------------------------- hosts are asked again
class Time:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Time:
    monkeypatch.setattr("mtrain.jobs.hosts.candidates.threading.Thread", _AtOnce)
    return Time()


def job_without_its_second_host(clock: Time) -> Any:
    job = hosts("step-00000004", None)
    job.members.pop(1)
    job._order, job._plan, job._candidates.clock = [0], plan(), clock
    job._candidates.findings_on = lambda member: [bad(member, reason) for reason in job.reasons]
    job.reasons, job.coming = ["the disk is full"], member(1)
    job.gathering.coming[1] = job.coming
    return job


def told(member: Member) -> list[str]:
    """What the console of a host shows."""
    return [message["text"] for message in member.channel.sent if message["do"] == "note"]


def test_a_host_that_did_not_fit_is_asked_again_and_taken_once_the_reason_is_gone(clock):
    job = job_without_its_second_host(clock)
    job._candidates.look(job._absent())
    assert job._candidates.unfit == [1]
    job.reasons = []
    job._candidates.look(job._absent())
    assert job._candidates.fitting == [], "not before its pause is over"
    clock.now = 5.0
    job._candidates.look(job._absent())
    assert job._candidates.fitting == [1]
    job.restore(plan(), outcome(ended=(0,), reformed="here"))
    assert job.next_plan(plan(), job.newest()).nodes == [0, 1]
    assert job.coming.channel.silence_s == 1.0, "its silence is noticed while it waits"


def test_the_pause_grows_and_the_reason_is_shown_once_here_and_each_time_at_the_host(clock):
    job = job_without_its_second_host(clock)
    checked_at = []
    for second in range(700):
        clock.now = float(second)
        before = len(told(job.coming))
        job._candidates.look(job._absent())
        if len(told(job.coming)) > before:
            checked_at.append(second)
    assert checked_at == [0, 5, 15, 35, 75, 155, 275, 395, 515, 635]
    assert job.shown.getvalue().count("the disk is full") == 1
    assert sum("the disk is full" in text for text in told(job.coming)) == len(checked_at)


def test_a_host_that_was_taken_and_is_refused_when_it_comes_back_is_told_of_again(clock):
    job = job_without_its_second_host(clock)
    job._candidates.look([1])
    job.reasons, clock.now = [], 5.0
    job._candidates.look([1])
    assert list(job._candidates.take()) == [1]
    job.reasons, job.gathering.coming[1] = ["the disk is full"], member(1)
    job._candidates.look([1])
    assert job._candidates.unfit == [1]
    assert job.shown.getvalue().count("the disk is full") == 2


def test_a_host_that_does_not_fit_and_is_lost_is_fetched_anew(clock):
    job = job_without_its_second_host(clock)
    job._candidates.look(job._absent())
    job.coming.channel.lost = "closed"
    job._candidates.look(job._absent())
    assert job.gathering.gone == [1]
    job.reasons, job.gathering.coming[1] = [], member(1)
    job._candidates.look(job._absent())
    assert job._candidates.fitting == [1]


@pytest.mark.parametrize("pause_s", [1.0, 1.9, 3.0])
def test_hosts_that_come_one_after_the_other_put_the_start_off_for_a_while_only(clock, pause_s):
    job = hosts(*["step-00000004"] * 200)
    job._candidates.clock, job._order, job._plan = clock, [0], plan()
    absent = {node: job.members.pop(node) for node in range(1, 200)}
    for node, coming in absent.items():
        job.gathering.coming[node] = coming
        job._looked_at = float("-inf")
        if job._why_reform(running()):
            break
        clock.now += pause_s
    assert clock.now <= elastic_hosts.PUT_OFF_S + pause_s, "from the first one that fits"
    assert node > 1


def test_the_pause_counts_from_the_last_of_several_hosts_and_their_patience_from_the_first(clock):
    """Three are missing, two come, and one of these is asked to wait for the other."""
    job = hosts("step-00000004", None, None, None)
    job._order, job._plan, job._candidates.clock = [0], plan(), clock
    for node in (1, 2, 3):
        job.members.pop(node)
    candidates = job._candidates
    assert candidates.fitting_since == (0.0, 0.0), "nobody has come"
    for now, node in ((10.0, 1), (11.5, 2)):
        clock.now, job.gathering.coming[node] = now, member(node)
        candidates.look(job._absent())
    assert candidates.fitting_since == (10.0, 11.5)
    clock.now, job._looked_at = 11.5 + elastic_hosts.SETTLE_S, float("inf")
    assert job._why_reform(running()) == ""
    clock.now += 0.1
    assert job._why_reform(running()) == "10.0.0.2, 10.0.0.3 are here"
    job.gathering.coming[3] = member(3)
    candidates.findings_on = lambda member: [bad(member, "the disk is full")]
    clock.now = 20.0
    candidates.look(job._absent())
    assert candidates.unfit == [3]
    assert candidates.fitting_since[1] == 11.5, "a host that does not fit puts nothing off"


def test_a_host_that_has_left_may_come_back(clock):
    job = hosts("step-00000004", None)
    job._candidates.clock = clock
    assert job._leaves(1)
    job.restore(plan(), outcome(ended=(0, 1), reformed="leaves"))
    assert sorted(job.members) == [0]
    job._plan, job.gathering.coming[1] = plan(), member(1)
    assert job._why_reform(running()) == "10.0.0.2 is here"
    job.restore(plan(), outcome(ended=(0,), reformed="here"))
    job.newest()
    assert job._order == [0, 1]
    assert job._leaves(1)
    assert job.gathering.left == [(1, 120.0), (1, 240.0)], "one that leaves often is fetched less often"


def test_a_host_that_comes_while_the_job_waits_is_checked_too(clock):
    """It may have been replaced by a machine with other data."""
    job = hosts("step-00000004", None, None, fewest=2)
    job._candidates.findings_on = lambda member: [bad(member, "has other data")]
    job.gathering.coming[1] = member(1)
    with pytest.raises(LaunchError, match=r"missing: 10.0.0.2, 10.0.0.3.*10.0.0.2: has other data"):
        job.restore(plan(), outcome(ended=(0,), lost=(1, 2)))


def test_a_host_that_does_not_fit_hears_how_the_job_ended(clock, monkeypatch):
    job = job_without_its_second_host(clock)
    job._candidates.look(job._absent())
    monkeypatch.setattr("mtrain.jobs.hosts.connected_hosts.supervise", lambda *arguments, **named: DONE)
    job.run(plan())
    assert sorted(job.members) == [0, 1], "the leader bids farewell to these"


def test_the_console_says_what_the_job_waits_for_and_without_whom_it_runs():
    job = hosts("step-00000004", None, None, fewest=2)
    with pytest.raises(LaunchError):
        job.restore(plan(), outcome(ended=(0,), lost=(1, 2)))
    assert "waits for 10.0.0.2, 10.0.0.3 (it needs 2 hosts: cluster.min_nodes)" in job.shown.getvalue()
    job._note_absent()
    assert "runs without 10.0.0.2, 10.0.0.3" in job.shown.getvalue()


def test_a_damaged_checkpoint_is_named_once_however_many_hosts_see_it():
    job = hosts("step-00000004", "step-00000004")
    for each in job.members.values():
        each.channel.warnings = ["step-00000008 is damaged and passed over"]
    for _ in range(3):
        assert job.newest().name == "step-00000004"
    assert job.shown.getvalue().count("step-00000008 is damaged") == 1


def test_a_machine_that_replaces_the_host_with_the_newest_checkpoint_is_not_taken_for_it():
    """The job waits for another host that has it, instead of ending."""
    job = hosts("step-00000004", "step-00000004", None, saved=4, back_s=5.0)
    job.newest()
    job._candidates.prepare = lambda member: None
    job.gathering.coming[0] = member(0)
    arrivals, asked = job.gathering.arrivals, []

    def late(nodes):
        asked.append(list(nodes))
        if len(asked) == 4:
            job.gathering.coming[1] = member(1, "step-00000004")
        return arrivals(nodes)

    job.gathering.arrivals = late
    job.rejoin_s = 0.0
    job.restore(plan(), outcome(ended=(2,), lost=(0, 1)))
    assert 1 in job.members
    assert job.next_plan(plan(), job.newest()).nodes == [1, 0, 2]
