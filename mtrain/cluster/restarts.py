"""The attempts of a job on several hosts: one, and after a failure as many more as are allowed, from the newest checkpoint."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtrain.cluster.attempt import Limits, Outcome, Round, heed
from mtrain.cluster.channel import Message, ask_all
from mtrain.cluster.hosts import Gathering, Member
from mtrain.errors import LaunchError, UsageError
from mtrain.jobs import supervisor
from mtrain.jobs.plan import Plan
from mtrain.jobs.supervisor import Traces
from mtrain.report.console import Display
from mtrain.system import job_secret, processes
from mtrain.system.diagnosis import Verdict

ASK_S = 30.0
"""For questions that an agent answers by itself."""
AGAIN_S = 1.0
"""Between two tries to reach a host that was lost."""


class Replan(Protocol):
    """What changes from one attempt to the next."""

    def folder(self, plan: Plan) -> Mapping[str, str]:
        """What is to be written into the run folder on every host: name -> text."""
        ...

    def again(self, members: dict[int, Member], plan: Plan, checkpoint: Path | None) -> Plan:
        """The plan of the next attempt on ``members``, from ``checkpoint``, None: from the beginning."""
        ...


@dataclass(kw_only=True)
class Result:
    """How the job ended."""

    code: int
    text: str
    run_dir: Path | None = None
    summary: Mapping[str, Any] | None = None
    """The run's own, where it came to an end."""
    first_host: str = ""
    """Where results lie, for people."""


@dataclass(kw_only=True)
class Attempts:
    """Runs them. Which hosts take part is an argument of each plan: ``Replan.again`` is given those that are there."""

    members: dict[int, Member]
    gathering: Gathering
    display: Display
    requests: processes.Requests
    replan: Replan
    forwarded: Mapping[str, str]
    limits: Limits
    back_s: float
    """For lost hosts to be back."""
    cwd: str | None = None
    """Of the ranks."""

    def run(self, plan: Plan) -> Result:
        """Prepare the hosts, and run ``plan`` and its followers to the end.

        Raises:
            UsageError: another job runs in the folder.
            LaunchError: lost hosts did not come back.
        """
        prepare(self.members, plan, self.replan.folder(plan), cwd=self.cwd)
        self.display.note(f"run folder: {plan.run_dir}")
        attempts = 0
        while True:
            attempts += 1
            outcome = Round(
                plan=plan,
                members=self.members,
                display=self.display,
                requests=self.requests,
                limits=self.limits,
                forwarded={**self.forwarded, **job_secret.drawn()},
                last_words=self.gathering.last_words,
            ).run()
            told = self._explain(plan, outcome)
            left = plan.max_restarts - attempts
            if told.code != 1 or self._asked() or left < 0:
                break
            plan = self._restarted(plan, outcome, told, left=left)
            if self._asked():
                return interrupted(self.requests)
        return Result(
            code=told.code,
            text=told.text,
            run_dir=plan.run_dir,
            summary=outcome.summary,
            first_host=self.members[0].label,
        )

    def _explain(self, plan: Plan, outcome: Outcome) -> Verdict:
        failures = outcome.real_failures()
        broken = outcome.lost and not self.requests.any()  # its ranks may have been asked to end by that
        traces = Traces(
            ok=outcome.ok,
            reason=None if broken else (outcome.last or {}).get("reason"),
            failures=failures,
            failed_at=time.time() - (time.monotonic() - failures[0]["when"]) if failures else None,
            run_dir=plan.run_dir,
            starter_killed=bool(outcome.killed_starters()),
        )
        told = supervisor.explain(traces, self.requests, newest=self._newest_name, judge=outcome.judge)
        unheard = outcome.unheard()
        if unheard:
            self.display.note(
                f"{', '.join(unheard)} could not be told to end; the agent there ends everything of this job when it has heard "
                f"nothing for {self.limits.silence_s:.0f} s"
            )
        return told

    def _newest(self) -> str | None:
        """The newest intact checkpoint on the first host.

        Raises:
            LaunchError: that host does not say.
        """
        try:
            found = ask(self.members, 0, "newest").get("checkpoint")
        except UsageError as error:  # the job has run, whatever the exit code of the question
            raise LaunchError(str(error)) from error
        return None if found is None else str(found)

    def _newest_name(self) -> str | None:
        try:
            found = None if self.members[0].channel.lost is not None else self._newest()
        except LaunchError:
            return None
        return None if found is None else Path(found).name

    def _restarted(self, plan: Plan, outcome: Outcome, told: Verdict, *, left: int) -> Plan:
        """The plan of the next attempt, with every host there again.

        Raises:
            LaunchError: some are not, for as long as a failure may take.
        """
        self.display.note(told.headline)
        gone = [
            node
            for node, member in self.members.items()
            if node not in outcome.ended or member.channel.lost is not None
        ]
        self._bring_back(gone)
        if self._asked():
            return plan
        if gone:
            back = {node: self.members[node] for node in gone}
            prepare(back, plan, self.replan.folder(plan), cwd=self.cwd, wait_s=self.limits.silence_s)
        newest = self._newest()
        source = f"from {Path(newest).name}" if newest else "from the beginning: there is no checkpoint yet"
        self.display.note(f"starting again {source} ({left} more restarts allowed)")
        return self.replan.again(self.members, plan, Path(newest) if newest else None)

    def _bring_back(self, gone: Sequence[int]) -> None:
        deadline = time.monotonic() + self.back_s
        left = list(gone)
        for node in left:
            self.gathering.let_go(node)
        while left and not self._asked():
            back, missing = self.gathering.gather(
                left, timeout_s=max(1.0, deadline - time.monotonic()), stop=self.requests.any
            )
            self.members |= back
            left = [node for node in left if node not in back]
            if left and time.monotonic() > deadline:
                lines = "\n".join(f"  {finding.line()}" for finding in missing)
                raise LaunchError(
                    f"the job cannot be started again: after {self.back_s:.0f} s these are not back\n{lines}"
                )
            if left:
                time.sleep(AGAIN_S)

    def _asked(self) -> bool:
        return asked(self.members, self.requests, self.display)


def asked(members: Mapping[int, Member], requests: processes.Requests, display: Display) -> bool:
    """Whether somebody has asked for the end, here or, while nothing runs there, at another host."""
    for member in members.values():
        for message in member.channel.receive():
            if message.get("event") == "asked":
                heed(message, member, requests, display)
    return requests.any()


def interrupted(requests: processes.Requests) -> Result:
    """A request to end came while nothing ran."""
    assert requests.first is not None
    return Result(code=supervisor.EXIT_CODES[requests.first], text=supervisor.NOTHING)


def ask(
    members: Mapping[int, Member],
    node: int,
    verb: str,
    *,
    timeout_s: float = ASK_S,
    stop: Callable[[], bool] = lambda: False,
    **fields: Any,
) -> Message:
    """Ask one host; ``stop``: whether its answer is not wanted any more.

    Raises:
        UsageError: it cannot, or does not answer; where its error has another exit code, ``LaunchError``.
    """
    (answer,) = ask_all([members[node].channel], verb, timeout_s=timeout_s, stop=stop, **fields)
    if "error" in answer:
        kind = UsageError if answer.get("code", 2) == UsageError.exit_code else LaunchError
        raise kind(f"{members[node].label}: {answer['error']}")
    return answer


def prepare(
    members: Mapping[int, Member], plan: Plan, files: Mapping[str, str], *, cwd: str | None, wait_s: float = 0.0
) -> None:
    """Make and take the run folder on ``members``; ``wait_s``: for an agent of before to let go of it.

    Raises:
        UsageError: some cannot; all are named.
    """
    answers = ask_all(
        [member.channel for member in members.values()],
        "prepare",
        timeout_s=ASK_S + wait_s,
        each=[{"node": node} for node in members],
        run_dir=str(plan.run_dir),
        log_dir=str(plan.log_dir) if plan.log_dir else None,
        files=dict(files),
        cwd=cwd,
        wait_s=wait_s,
    )
    problems = [
        f"{member.label}: {answer['error']}"
        for member, answer in zip(members.values(), answers, strict=True)
        if "error" in answer
    ]
    if problems:
        raise UsageError("\n".join(problems))
