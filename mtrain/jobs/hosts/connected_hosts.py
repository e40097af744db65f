"""The hosts that a leader has connected: prepare them, run attempts on them, and reconnect those that were lost."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtrain.errors import LaunchError, UsageError
from mtrain.jobs.hosts import messages
from mtrain.jobs.hosts.channel import ask_all
from mtrain.jobs.hosts.hosts import Gathering, Member
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.preflight.findings import merge_findings
from mtrain.jobs.run.attempt import Attempt, Limits, note_request
from mtrain.jobs.run.metrics import READ_S
from mtrain.jobs.run.outcome import Outcome
from mtrain.jobs.run.supervisor import FAILURES, Hosts, Result, supervise
from mtrain.records.display import Display
from mtrain.spec.hostnames import few
from mtrain.system import job_secret, processes

ASK_S = 30.0
"""Seconds that an agent may take to answer a request that it handles without help of other processes."""
UNEXPECTED = 1
"""Exit code of a job that ends with an error of its leader."""
AGAIN_S = 1.0
"""Seconds between two tries to reach a host that was lost."""


@dataclass(kw_only=True)
class ConnectedHosts(Hosts):
    """The hosts of a job, each with an agent, see ``supervisor.Hosts``."""

    members: dict[int, Member]
    """The hosts, by index. A host that comes back is replaced here."""
    gathering: Gathering
    display: Display
    requests: processes.Requests
    """Signals that ask this process to end the job."""
    files: Callable[[Plan], Mapping[str, str]]
    """Returns the files to write into the run folder on every host: name -> text."""
    replan: Callable[[Plan, Path | None, Sequence[int]], Plan]
    """Returns the plan of another attempt of this plan's job on hosts, by index, from a checkpoint; None: from the
    beginning."""
    forwarded: Mapping[str, str]
    """Environment variables that are sent to every host."""
    limits: Limits
    back_s: float
    """Seconds within which lost hosts must be back."""
    cwd: str | None = None
    """Working directory of the ranks; None: that of each agent."""
    attempts: int = 0
    """How many attempts were made."""

    def run(self, plan: Plan) -> Result:
        """Prepare the hosts, run ``plan``, and restart after failures as often as the plan allows.

        Raises:
            UsageError: another job runs in the run folder.
            LaunchError: lost hosts did not come back.
        """
        # Every host locks the folder before any of them starts ranks, so a second job of that name changes nothing.
        prepare(self.members, plan, messages.pack_files(self.files(plan)), cwd=self.cwd)
        self.display.note(f"run folder: {plan.run_dir}")
        code = UNEXPECTED
        try:
            result = supervise(self, plan, requests=self.requests, display=self.display)
            code = result.code
        finally:
            if code in FAILURES and plan.metrics is not None:
                # The hosts tell Prometheus, and answer once that was read: afterwards nobody serves metrics.
                channels = [member.channel for member in self.members.values() if member.channel.lost is None]
                ask_all(channels, "failed", timeout_s=READ_S + ASK_S, stop=self.requests.any)
        return result

    def attempt(self, plan: Plan) -> Outcome:
        """Run the plan's command on every host; note hosts on which processes may still run."""
        outcome = self._attempt(plan, members=self.members, last_words=self.gathering.last_words)
        unheard = outcome.unheard()
        if unheard:
            self.display.note(
                f"{few(unheard)} could not be told to end; the agent there ends everything of this job when it "
                f"has heard nothing for {self.limits.silence_s:.0f} s"
            )
        return outcome

    def _attempt(self, plan: Plan, **more: Any) -> Outcome:
        """Run the plan once; ``more``: see ``Attempt``."""
        self.attempts += 1
        return Attempt(
            plan=plan,
            restarts=self.attempts - 1,
            display=self.display,
            requests=self.requests,
            limits=self.limits,
            # Each attempt has a secret of its own: ranks of a former one that still run can then take no part in it.
            forwarded={**self.forwarded, **job_secret.draw_secret()},
            **more,
        ).run()

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint on the first host, or None.

        Raises:
            LaunchError: that host does not answer, or cannot tell.
        """
        try:
            answer = ask(self.members, 0, "newest")
        except UsageError as error:  # The job has run, so this is no wrong use: its exit code must be 1, not 2.
            raise LaunchError(str(error)) from error
        messages.show_warnings([(self.members[0].label, answer)], self.display.note)
        return None if answer.get("checkpoint") is None else Path(answer["checkpoint"])

    def restore(self, plan: Plan, outcome: Outcome) -> None:
        """Wait until every host is connected again, and prepare those that were lost.

        Raises:
            LaunchError: hosts are still missing after ``back_s``.
        """
        # A host that has not reported the end of its command may still run ranks, so its agent must be a new one.
        absent = [
            node
            for node, member in self.members.items()
            if node not in outcome.ended or member.channel.lost is not None
        ]
        if absent:
            names = few([self.members[node].label for node in absent])
            self.display.note(f"waiting for {names} to be back, for up to {self.back_s:.0f} s")
        self._bring_back(absent)
        if absent and not self.end_requested():
            back = {node: self.members[node] for node in absent}
            files = messages.pack_files(self.files(plan))
            # The former agent of a host that fell silent holds the run folder until it has missed the leader for as long.
            prepare(back, plan, files, cwd=self.cwd, wait_s=self.limits.silence_s)

    def next_plan(self, plan: Plan, checkpoint: Path | None) -> Plan:
        """Return the plan of the next attempt on the hosts that are connected now."""
        return self.replan(plan, checkpoint, sorted(self.members))

    def end_requested(self) -> bool:
        """Return whether somebody has asked for the end of the job, here or at another host."""
        return end_requested(self.members, self.requests, self.display)

    def _bring_back(self, absent: Sequence[int]) -> None:
        """Reconnect the hosts ``absent``, until all are back, or until somebody asks for the end of the job.

        Raises:
            LaunchError: hosts are still missing after ``back_s``.
        """
        deadline = time.monotonic() + self.back_s
        missing = list(absent)
        # ssh may refuse a host at once while it boots, so hosts are tried again until the time is over.
        self.gathering.let_go(missing)
        while missing and not self.end_requested():
            back, findings = self.gathering.gather(
                missing, timeout_s=max(1.0, deadline - time.monotonic()), stop=self.requests.any
            )
            self.members |= back
            missing = [node for node in missing if node not in back]
            if missing and time.monotonic() > deadline:
                lines = "\n".join(f"  {finding.line()}" for finding in merge_findings(findings))
                raise LaunchError(
                    f"the job cannot be started again: after {self.back_s:.0f} s these are not back\n{lines}"
                )
            if missing:
                time.sleep(AGAIN_S)


def end_requested(members: Mapping[int, Member], requests: processes.Requests, display: Display) -> bool:
    """Return whether somebody has asked for the end of the job, here or at another host.

    Call it only while no attempt runs: it takes all messages out of the channels.
    """
    # What else agents send between attempts, a request to save, concerns nobody then.
    for member in members.values():
        for message in member.channel.receive():
            if message.get("event") == "asked":
                note_request(message, member, requests, display)
    return requests.any()


def ask(
    members: Mapping[int, Member],
    node: int,
    verb: str,
    *,
    timeout_s: float = ASK_S,
    stop: Callable[[], bool] = lambda: False,
    **fields: Any,
) -> Message:
    """Send a request to one host and return its answer; ``stop`` ends the waiting by returning True.

    Raises:
        UsageError: the host does not answer, or answers with an error whose exit code is 2 or missing.
        LaunchError: it answers with an error that has another exit code.
    """
    (answer,) = ask_all([members[node].channel], verb, timeout_s=timeout_s, stop=stop, **fields)
    if "error" in answer:
        kind = UsageError if answer.get("code", 2) == UsageError.exit_code else LaunchError
        raise kind(f"{members[node].label}: {answer['error']}")
    return answer


def prepare(
    members: Mapping[int, Member], plan: Plan, files: Mapping[str, Any], *, cwd: str | None, wait_s: float = 0.0
) -> None:
    """Make and lock the run folder on all ``members``, and write ``files`` (``messages.pack_files``) there.

    A host may wait ``wait_s`` for an agent of an earlier attempt to release the lock.

    Raises:
        UsageError: hosts that could not, all of them named.
    """
    answers = ask_all(
        [member.channel for member in members.values()],
        "prepare",
        timeout_s=ASK_S + wait_s,
        each=[{"node": node, "metrics": _metrics(plan, member)} for node, member in members.items()],
        run_dir=str(plan.run_dir),
        log_dir=str(plan.log_dir) if plan.log_dir else None,
        files=files,
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


def _metrics(plan: Plan, member: Member) -> dict[str, Any] | None:
    """Return where a host answers Prometheus, for a message."""
    return None if plan.metrics is None else asdict(plan.metrics.on(member.host))
