"""The restart loop, the same for one host and for several: when it restarts, from which checkpoint, and how it ends."""

import io
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain.errors import LaunchError
from mtrain.jobs.run.supervisor import supervise
from mtrain.records.console import Quiet
from mtrain.system.diagnosis import Verdict
from mtrain.system.processes import Requests

FAILED = Verdict(code=1, headline="rank 1 failed", text="error: rank 1 failed")
REFUSED = Verdict(code=2, headline="refused", text="error: refused")


def plan(max_restarts: int = 0, name: str = "first"):
    hosts = [SimpleNamespace(address="10.0.0.1")]
    return SimpleNamespace(
        max_restarts=max_restarts,
        run_dir=Path("runs/x"),
        name=name,
        hosts=hosts,
        log_dir=None,
        knows_mtrain=True,
        saves=True,
    )


class Hosts:
    """Hosts whose attempts end as planned: None stands for success."""

    def __init__(self, *verdicts: Verdict | None, checkpoint: Path | None = None) -> None:
        self.requests = Requests()
        self.verdicts = list(verdicts)
        self.checkpoint = checkpoint
        self.plans: list[str] = []
        self.changes: list[str] = []
        self.restored = 0
        self.shown = io.StringIO()

    def attempt(self, current):
        self.plans.append(current.name)
        verdict = self.verdicts.pop(0)
        return SimpleNamespace(
            grace_s=None,
            started_at=None if self.checkpoint is None else 1.0,
            reformed="",
            plan=current,
            ok=verdict is None,
            lost={},
            last={},
            summary={"updates": 3} if verdict is None else None,
            members={0: SimpleNamespace(label="")},
            judge=lambda: verdict,
            real_failures=list,
            killed_starters=list,
        )

    def newest(self):
        return self.checkpoint

    def change(self, outcome):
        return self.changes.pop(0) if self.changes else ""

    def restore(self, current, outcome) -> None:
        self.restored += 1

    def next_plan(self, current, checkpoint):
        return plan(current.max_restarts, name=checkpoint.name if checkpoint else "from the beginning")

    def end_requested(self) -> bool:
        return self.requests.any()

    def supervise(self, max_restarts: int):
        return supervise(self, plan(max_restarts), requests=self.requests, display=Quiet(self.shown))


def test_a_failed_job_goes_on_from_the_newest_checkpoint_until_it_succeeds():
    hosts = Hosts(FAILED, FAILED, None, checkpoint=Path("step-00000004"))
    result = hosts.supervise(3)
    assert (result.code, result.text, result.summary) == (0, "", {"updates": 3})
    assert hosts.plans == ["first", "step-00000004", "step-00000004"]
    assert hosts.shown.getvalue().splitlines()[:2] == [
        "rank 1 failed",
        "starting again from step-00000004 (2 more restarts allowed)",
    ]


def test_a_change_of_hosts_is_no_restart_that_counts():
    hosts = Hosts(FAILED, FAILED, None, checkpoint=Path("step-00000004"))
    hosts.changes = ["host 2 is lost", "host 2 is lost"]
    assert hosts.supervise(0).code == 0
    assert hosts.shown.getvalue().splitlines()[:2] == [
        "rank 1 failed",
        "starting again from step-00000004 on 1 of its hosts",
    ]


def test_after_changes_of_hosts_all_restarts_are_left_for_failures():
    hosts = Hosts(FAILED, FAILED, FAILED, None, checkpoint=Path("step-00000004"))
    hosts.changes = ["host 2 is lost", "host 3 is lost"]
    result = hosts.supervise(1)
    assert (result.code, result.summary, hosts.restored) == (0, {"updates": 3}, 3)


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_job_is_started_again_as_often_as_allowed_and_then_ends_with_its_error(max_restarts):
    hosts = Hosts(*[FAILED] * 3)
    result = hosts.supervise(max_restarts)
    assert (result.code, result.text) == (1, FAILED.text)
    assert hosts.restored == max_restarts == len(hosts.plans) - 1


KILLED = Verdict(code=1, headline="rank 1 was killed", text="error: rank 1 was killed", from_outside=True)


@pytest.mark.parametrize(
    ("verdict", "restarts", "checkpoint", "named"),
    [
        (KILLED, 0, Path("step-00000004"), True),
        (KILLED, 1, Path("step-00000004"), False),  # allowed already
        (KILLED, 0, None, False),  # nothing to go on from
        (FAILED, 0, Path("step-00000004"), False),  # an error of the job's own comes again
        (REFUSED, 0, Path("step-00000004"), False),
    ],
)
def test_a_job_that_another_start_may_help_names_the_option_for_it(verdict, restarts, checkpoint, named):
    hosts = Hosts(*[verdict] * (restarts + 1), checkpoint=checkpoint)
    text = supervise(hosts, plan(restarts), requests=hosts.requests, display=Quiet(hosts.shown)).text
    assert text.splitlines()[-1] == verdict.text
    assert ("from step-00000004 with --resume runs/x; with --max-restarts 3" in text) == named


def test_a_refused_job_is_not_started_again():
    hosts = Hosts(REFUSED)
    assert hosts.supervise(5).code == 2
    assert hosts.restored == 0


def test_a_request_while_hosts_are_awaited_ends_the_job_and_names_the_run(monkeypatch):
    hosts = Hosts(FAILED)
    monkeypatch.setattr(hosts, "restore", lambda current, outcome: hosts.requests.take(signal.SIGINT))
    result = hosts.supervise(1)
    assert result.code == 130
    assert result.text == "ended before the job was started again; go on with --resume runs/x"
    assert result.run_dir == Path("runs/x")


def test_an_unknown_newest_checkpoint_does_not_hide_the_end_that_was_asked_for(monkeypatch):
    def unknown():
        raise LaunchError("the first host does not answer")

    hosts = Hosts(FAILED)
    hosts.requests.take(signal.SIGTERM)
    monkeypatch.setattr(hosts, "newest", unknown)
    assert hosts.supervise(1).code == 143
