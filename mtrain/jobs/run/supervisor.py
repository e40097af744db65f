"""The supervisor of a job: run its attempts, determine why each one ended, and restart after failures.

One host is a cluster of one: ``Hosts`` is either this host, whose command the supervisor's process runs itself
(``this_host.py``), or several hosts with an agent on each (``connected_hosts.py``).
"""

import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mtrain.errors import LaunchError
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.run.outcome import Outcome
from mtrain.records.display import Display
from mtrain.system.diagnosis import Verdict
from mtrain.system.processes import EXIT_CODES, Requests
from mtrain.system.runfolder import RunFolder

FAILURES = (1, 2)
"""Exit codes of a job that has failed; the others are those of one that is done, or was asked to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a job ended."""

    code: int
    """Exit code: 0, 1, 2, 130 or 143."""
    text: str
    """The reason with all that helps to find its cause, for people; "" for success."""
    reason: str = ""
    """The reason in one line; "" for success, and where it is not known."""
    run_dir: Path | None = None
    """The run folder on the first host; None: nothing was started."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``summary.json`` on the first host; empty where there is none."""
    first_host: str = ""
    """Label of the host on which the results are; empty if the job has only this host."""
    first_address: str = ""
    """Address of that host; empty where nothing was started."""


class Hosts(Protocol):
    """The hosts of a job."""

    def attempt(self, plan: Plan) -> Outcome:
        """Run the plan's commands on all hosts to their end.

        Raises:
            LaunchError: a command cannot be started at all.
        """

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint of the run, or None.

        Raises:
            LaunchError: this cannot be found out.
        """

    def change(self, outcome: Outcome) -> str:
        """Return why the job goes on with other hosts after this attempt, in words; "": it does not.

        Such a restart is not one of those that ``cluster.max_restarts`` allows. By default, the hosts of a job do not change.
        """
        return ""

    def restore(self, plan: Plan, outcome: Outcome) -> None:
        """Make the hosts ready for another attempt; return early once somebody asks for the end of the job. By default, they are.

        Raises:
            LaunchError: hosts that were lost did not come back.
        """
        del plan, outcome

    def next_plan(self, plan: Plan, checkpoint: Path | None) -> Plan:
        """Return the plan of the next attempt, from a checkpoint; None: from the beginning."""

    def end_requested(self) -> bool:
        """Return whether somebody has asked for the end of the job. It must not be called during an attempt."""


def supervise(hosts: Hosts, plan: Plan, *, requests: Requests, display: Display) -> Result:
    """Run a plan to its end. After a failure, run it again from the newest checkpoint, as often as the plan allows.

    Raises:
        LaunchError: a command cannot be started at all, or hosts that were lost did not come back.
    """
    restarts_left = plan.max_restarts
    while True:
        outcome = hosts.attempt(plan)
        verdict = explain(outcome, requests, newest=hosts.newest)
        # A change of hosts is no fault of the job, so it takes none of the restarts that the user allows.
        change = hosts.change(outcome)
        goes_on = bool(change) and verdict.code != 0
        if hosts.end_requested() or not (goes_on or (verdict.code == 1 and restarts_left > 0)):
            break
        restarts_left -= 0 if goes_on else 1
        if not outcome.reformed:  # else the attempt has told it
            display.note(verdict.headline)
        # Waiting for lost hosts may take minutes, in which somebody may give up.
        hosts.restore(plan, outcome)
        if hosts.end_requested():
            verdict = _ended_between_attempts(plan, requests)
            break
        newest = hosts.newest()
        source = (
            f"from {newest.name} "
            if newest
            else "from the beginning: there is no checkpoint yet "
            if plan.saves
            else ""
        )
        plan = hosts.next_plan(plan, newest)
        how = f"on {len(plan.hosts)} of its hosts" if goes_on else f"({restarts_left} more restarts allowed)"
        display.note(f"starting again {source}{how}")
    display.show_end(verdict.code, logs=RunFolder(plan.run_dir, plan.log_dir).logs)
    return Result(
        code=verdict.code,
        text=_with_way_on(verdict, outcome, newest=hosts.newest),
        reason=verdict.reason if verdict.code else "",
        run_dir=plan.run_dir,
        summary=outcome.summary or {},
        first_host=outcome.members[0].label,
        first_address=plan.hosts[0].address,
    )


def _with_way_on(verdict: Verdict, outcome: Outcome, *, newest: Callable[[], Path | None]) -> str:
    """Return what a job says that has ended; where another start may help and none is allowed, how it goes on."""
    plan = outcome.plan
    # Where no rank has trained, the same start fails in the same way.
    has_trained = outcome.started_at is not None
    may_help = verdict.code == 1 and verdict.from_outside and "--resume" not in verdict.text
    checkpoint = _newest(newest) if may_help and has_trained and not plan.max_restarts else None
    if checkpoint is None:
        return verdict.text
    way_on = f"go on from {checkpoint.name} with --resume {shlex.quote(str(plan.run_dir))}"
    return f"{way_on}; with --max-restarts 3 a job does so by itself, up to three times\n{verdict.text}"


def _ended_between_attempts(plan: Plan, requests: Requests) -> Verdict:
    way_on = f"; go on with --resume {shlex.quote(str(plan.run_dir))}" if plan.saves else ""
    text = f"ended before the job was started again{way_on}"
    return Verdict(code=EXIT_CODES[requests.first or signal.SIGTERM], headline="ended", text=text)


def explain(outcome: Outcome, requests: Requests, *, newest: Callable[[], Path | None]) -> Verdict:
    """Determine the exit code of an attempt, and the message if the job did not end by itself.

    ``newest`` returns the newest intact checkpoint. It is called only if it is needed, because it reads files.
    """
    failures = outcome.real_failures()
    # The loss of a host ends the ranks elsewhere as a request would, so the reason that they record is not the user's.
    broken = outcome.lost and not requests.any()
    saved = not broken and outcome.last.get("reason") == "interrupted"
    if outcome.ok and not saved and (outcome.plan.knows_mtrain or requests.first is None):
        return Verdict(code=0, headline="done", text="")
    go_on = f"--resume {shlex.quote(str(outcome.plan.run_dir))}"
    if outcome.killed_starters() and requests.first is None:  # Ranks then save and end as if they were asked to.
        verdict = outcome.judge()
        if not saved:
            return verdict
        return replace(verdict, text=f"the ranks have saved their state; go on with {go_on}\n{verdict.text}")
    if saved and not failures:
        code = EXIT_CODES[requests.first or signal.SIGTERM]
        return Verdict(code=code, headline="ended", text=_saved_words(outcome.last, go_on))
    if requests.first is not None and outcome.last.get("reason") == "done" and not failures:
        text = "ended after the last update: all is saved, and nothing is left to do"
        return Verdict(code=EXIT_CODES[requests.first], headline="ended", text=text)
    if requests.first is None or _failed_before(failures, requests):
        return outcome.judge()  # The user who pressed Ctrl-C after the failure still needs its reason.
    # A rank that refuses the spec while it is asked to end refuses it at the next start too, so its reason counts.
    refused = any(failure.get("expected") for failure in failures)
    if requests.count > 1 or not refused:
        cause = ""
        if outcome.grace_s is not None:
            cause = (
                f": ranks still ran {outcome.grace_s:g} s after {requests.first.name}, and were ended (cluster.grace_s)"
            )
        if outcome.plan.saves:
            checkpoint = _newest(newest)
            way_on = f"go on from {checkpoint.name} with {go_on}" if checkpoint else "there is no checkpoint"
            text = f"ended before the state was saved{cause}; {way_on}"
        else:
            text = f"ended by {requests.first.name}{cause}"
            if outcome.plan.knows_mtrain:
                text += "; there is no result: start it again"
        return Verdict(code=EXIT_CODES[requests.first], headline="ended", text=text)
    return outcome.judge()


def _saved_words(last: Mapping[str, Any], go_on: str) -> str:
    """Return what a job says whose ranks have saved and ended because they were asked to; ``last``: its record of the end."""
    left_out = ", ".join(last.get("left_out") or ())
    made, total = last.get("updates"), last.get("total_updates")
    if total is None or made is None or made < total:
        return f"ended, state saved; go on with {go_on}" + (f"; left out: {left_out}" if left_out else "")
    rest = f"; {go_on} makes what was left out: {left_out}" if left_out else ", and nothing is left to do"
    return f"ended after the last update: all {total} updates are made and their state is saved{rest}"


def _failed_before(failures: Sequence[Mapping[str, Any]], requests: Requests) -> bool:
    """Return whether a rank had failed before the first request to end."""
    if not failures or requests.first_at is None:
        return False
    return time.time() - (time.monotonic() - float(failures[0]["when"])) < requests.first_at


def _newest(newest: Callable[[], Path | None]) -> Path | None:
    try:
        return newest()
    except LaunchError:  # The host that has it is lost.
        return None
