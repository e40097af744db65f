"""The hosts of an elastic job: some may be lost and others come while it runs, and it goes on with those that are there.

What the job computes does not depend on them (``jobs.elastic``), so each change of hosts is one more attempt from the
newest checkpoint. Where hosts come, or leave because they were asked to end, that checkpoint is written for the purpose
and no update is repeated. Where hosts are lost, the updates since the newest checkpoint are.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mtrain.cluster.attempt import Attempt
from mtrain.cluster.channel import ask_all
from mtrain.cluster.connected_hosts import AGAIN_S, ASK_S, ConnectedHosts, prepare
from mtrain.cluster.farewell import Farewell
from mtrain.cluster.hosts import Member
from mtrain.cluster.outcome import Outcome
from mtrain.cluster.preflight.findings import Finding
from mtrain.cluster.supervisor import EXIT_CODES, Result
from mtrain.core.checkpoint import store
from mtrain.errors import LaunchError, UsageError
from mtrain.jobs.plan import Plan
from mtrain.system import job_secret

LOOK_S = 1.0
"""Seconds between two looks for hosts that come."""
SETTLE_S = 2.0
"""Seconds in which hosts that come together cause one new start of the job."""


@dataclass(kw_only=True)
class ElasticHosts(ConnectedHosts):
    """See ``supervisor.Hosts``; the job runs with at least ``fewest`` of ``all_nodes``."""

    all_nodes: Sequence[int]
    """Indices of all hosts of the job, present or not."""
    names: Sequence[str]
    """Addresses of all of them."""
    fewest: int
    rejoin_s: float
    """Seconds for which lost hosts are awaited before the job goes on without them."""
    findings_on: Callable[[Member], list[Finding]]
    """Returns what keeps a host that has come from taking part; it runs in a thread."""
    _order: list[int] = field(default_factory=list)
    """The hosts that take part, in the order of their ranks."""
    _leaving: set[int] = field(default_factory=set)
    """Hosts that were asked to end, and leave."""
    _refused: set[int] = field(default_factory=set)
    """Hosts that do not come back: they have left, or do not fit."""
    _admitted: dict[int, Member] = field(default_factory=dict)
    """Hosts that have come and take part from the next attempt on."""
    _admitted_at: float = 0.0
    _examined: set[int] = field(default_factory=set)
    """Hosts that have come and are being checked."""
    _plan: Plan | None = None
    """The plan of the attempt that runs."""
    _reasons: list[str] = field(default_factory=list)
    """What is to be shown about hosts that cannot take part; a thread adds to it."""
    _looked_at: float = 0.0
    _saved: int = -1
    """Update of the newest checkpoint that was seen."""

    def __post_init__(self) -> None:
        self._order = sorted(self.members)

    def run(self, plan: Plan) -> Result:
        """See ``ConnectedHosts.run``; hosts that have come too late to take part are told how the job ended, too."""
        try:
            return super().run(plan)
        finally:
            self.members |= self._admitted

    def attempt(self, plan: Plan) -> Outcome:
        """Run the plan on the hosts that take part, and look for others meanwhile."""
        order, self._plan = list(self._order), plan
        if plan.resume is not None:
            self._saved = max(self._saved, store.update_named(plan.resume))
        self.attempts += 1
        outcome = Attempt(
            plan=plan,
            restarts=self.attempts - 1,
            members={place: self.members[node] for place, node in enumerate(order)},
            display=self.display,
            requests=self.requests,
            limits=self.limits,
            forwarded={**self.forwarded, **job_secret.drawn()},
            last_words=lambda place: self.gathering.last_words(order[place]),
            reform=self._why_reform,
            leaves=lambda place: self._leaves(order[place]),
        ).run()
        self._saved = max(self._saved, outcome.saved)
        return outcome

    def change(self, outcome: Outcome) -> str:
        """Return which hosts are lost, leave or have come."""
        if outcome.reformed:
            return outcome.reformed
        lost = [self._order[place] for place in self._lost(outcome)]
        return outcome.judge().headline if lost else ""

    def newest(self) -> Path | None:
        """Return the newest checkpoint that any of the hosts has, and let the host that has it lead the ranks.

        Raises:
            LaunchError: the newest one that was written is on none of them.
        """
        nodes = sorted(self.members)
        answers = ask_all([self.members[node].channel for node in nodes], "newest", timeout_s=ASK_S)
        found = {
            node: Path(each["checkpoint"]) for node, each in zip(nodes, answers, strict=True) if each.get("checkpoint")
        }
        best = max(map(store.update_named, found.values()), default=-1)
        if best < self._saved:
            raise LaunchError(
                f"the newest checkpoint, of update {self._saved}, is on none of the hosts that are there; start the host "
                "that has it, and go on with --resume, or let all hosts share the run folder"
            )
        holders = [node for node in nodes if node in found and store.update_named(found[node]) == best]
        self._order = [*holders, *(node for node in nodes if node not in holders)]
        return found[holders[0]] if holders else None

    def restore(self, plan: Plan, outcome: Outcome) -> None:
        """Drop hosts that are gone, take those that have come, and wait while there are too few.

        Raises:
            LaunchError: after ``back_s`` there are still fewer than the job needs, or none has its newest checkpoint.
        """
        self._drop_leaving()
        for place in self._lost(outcome):
            self.gathering.let_go(self._order[place])
            self.members.pop(self._order[place], None)
        self.members |= {node: member for node, member in self._admitted.items() if member.channel.lost is None}
        self._admitted = {}
        began = time.monotonic()
        while not self.end_requested():
            waited = time.monotonic() - began
            enough = len(self.members) >= self.fewest and self._have_newest()
            if not self._absent() or (enough and waited >= (self.rejoin_s if not outcome.reformed else 0.0)):
                return
            if waited > max(self.back_s, self.rejoin_s):
                raise LaunchError(self._too_few(waited))
            self._take(plan, self.gathering.arrivals(self._absent()))
            time.sleep(AGAIN_S / 2)

    def next_plan(self, plan: Plan, checkpoint: Path | None) -> Plan:
        """Return the plan of the next attempt on the hosts that take part."""
        return self.replan(plan, checkpoint, self._order)

    # --------------------------------------------------------------------------------------------- hosts that come, or go
    def _why_reform(self) -> str:
        """Look for hosts now and then; return who has come or leaves, once the job is to be started again with them."""
        if self._leaving:
            return f"{self._named(self._leaving)} asked to end, and leaves"
        while self._reasons:
            self.display.note(self._reasons.pop(0))
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            wanted = [node for node in self._absent() if node not in self._examined]
            for node, member in self.gathering.arrivals(wanted).items():
                self._examined.add(node)
                threading.Thread(target=self._examine, args=(node, member), daemon=True).start()
        complete = not self._examined and not self._absent()
        if self._admitted and (complete or now - self._admitted_at > SETTLE_S):
            return f"{self._named(self._admitted)} here"
        return ""

    def _examine(self, node: int, member: Member) -> None:
        """Check a host that has come while the job runs on the others."""
        assert self._plan is not None
        try:
            bad = [finding.line() for finding in self.findings_on(member)]
            if not bad:
                prepare({node: member}, self._plan, self.files(self._plan), cwd=self.cwd, wait_s=self.limits.silence_s)
        except Exception as error:  # the job that runs must not end because of a host that comes
            bad = [str(error)]
        if bad and member.channel.lost is None:
            self._reasons.append("; ".join([f"{member.label} cannot take part", *bad]))
            self._refused.add(node)
        elif not bad:
            self._admitted_at = time.monotonic()
            self._admitted = {**self._admitted, node: member}
        self._examined.discard(node)

    def _leaves(self, node: int) -> bool:
        """Return whether the job can go on without a host that was asked to end; note that it leaves."""
        if len(self._order) - len({*self._leaving, node}) < self.fewest or self.requests.any():
            return False
        self._leaving.add(node)
        return True

    def _drop_leaving(self) -> None:
        for node in self._leaving:
            member = self.members.pop(node, None)
            self._refused.add(node)
            if member is not None:
                text = "this host has left the job, which goes on without it"
                member.channel.send(Farewell(code=EXIT_CODES[signal.SIGTERM], text=text).message())
                self.gathering.let_go(node)
        self._leaving = set()

    def _take(self, plan: Plan, arrived: Mapping[int, Member]) -> None:
        """Prepare hosts that have come; one that cannot be prepared is left out."""
        for node, member in arrived.items():
            try:
                prepare({node: member}, plan, self.files(plan), cwd=self.cwd, wait_s=self.limits.silence_s)
            except UsageError as error:
                self.display.note(f"{member.label} cannot take part: {error}")
                self._refused.add(node)
                self.gathering.let_go(node)
            else:
                self.members[node] = member

    # ----------------------------------------------------------------------------------------------------------- questions
    def _absent(self) -> list[int]:
        present = {*self.members, *self._admitted, *self._refused}
        return [node for node in self.all_nodes if node not in present]

    def _lost(self, outcome: Outcome) -> list[int]:
        """Return the places, in the order of the attempt, of hosts whose agent is gone."""
        return [
            place
            for place, node in enumerate(self._order)
            if place not in outcome.ended or place in outcome.lost or self._is_gone(node)
        ]

    def _is_gone(self, node: int) -> bool:
        return node in self.members and self.members[node].channel.lost is not None

    def _have_newest(self) -> bool:
        if self._saved < 0:
            return True
        try:
            self.newest()
        except LaunchError:
            return False
        return True

    def _too_few(self, waited: float) -> str:
        there = len(self.members)
        if there >= self.fewest:
            return (
                f"the newest checkpoint, of update {self._saved}, is on none of the {there} hosts that are there after "
                f"{waited:.0f} s; start the others, and go on with --resume, or let all hosts share the run folder"
            )
        return (
            f"the job cannot go on: {there} of its hosts are there after {waited:.0f} s, and it needs {self.fewest} "
            f"(cluster.min_nodes); missing: {self._named(self._absent(), verb=False)}; go on with --resume"
        )

    def _named(self, nodes: Iterable[int], *, verb: bool = True) -> str:
        names = [self.members[node].label if node in self.members else self.names[node] for node in sorted(nodes)]
        return ", ".join(names) + (f" {'is' if len(names) == 1 else 'are'}" if verb else "")
