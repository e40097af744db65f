"""The hosts of an elastic job: some may be lost and others come while it runs, and it goes on with those that are there.

What the job computes does not depend on them (``jobs.plan.elastic``), so each change of hosts is one more attempt from the
newest checkpoint. Where hosts come, or leave because they were asked to end, that checkpoint is written for the purpose
and no update is repeated. Where hosts are lost, the updates since the newest checkpoint are.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.errors import LaunchError
from mtrain.jobs.hosts import messages
from mtrain.jobs.hosts.candidates import Candidates
from mtrain.jobs.hosts.channel import ask_all
from mtrain.jobs.hosts.connected_hosts import AGAIN_S, ASK_S, ConnectedHosts, prepare
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.hosts.messages import Farewell
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.preflight.findings import Finding
from mtrain.jobs.run.outcome import Outcome
from mtrain.jobs.run.supervisor import Result
from mtrain.spec.hostnames import few
from mtrain.system.processes import EXIT_CODES

LOOK_S = 1.0
"""Seconds between two looks for hosts that come."""
SETTLE_S = 2.0
"""Seconds in which hosts that come together cause one new start of the job."""
CHECK_S = 10.0
"""Seconds for which a job that starts again waits, beyond ``rejoin_s``, for a host that has come and is being checked; and for
which hosts that fit wait for others that are being checked, while the job runs."""
PUT_OFF_S = 30.0
"""Seconds for which hosts that come one after the other put off the new start of a job, which runs without them meanwhile."""
LEFT_S = 120.0
"""Seconds after which a host that was asked to end is fetched again, where this process starts its agent; twice as many
each further time."""


MAX_HANGS = 2
"""Attempts of a job that ranks of one host may end by hanging."""
HUNG_S = 24 * 3600.0
"""Seconds for which a host is not fetched again whose ranks have hung that often."""


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
    _hung: dict[int, int] = field(default_factory=dict)
    """By host: how many attempts were ended because ranks there hung."""
    _left: dict[int, int] = field(default_factory=dict)
    """By host: how many times it has left."""
    _waits: str = ""
    """What was last shown of what the job waits for."""
    _warnings: set[str] = field(default_factory=set)
    """Warnings of hosts that were shown; each is shown once."""
    _plan: Plan | None = None
    """The plan of the attempt that runs."""
    _packing: threading.Lock = field(default_factory=threading.Lock)
    _pack: tuple[Plan, dict[str, Any]] | None = None
    """The plan of an attempt, and the files that hosts which come during it receive."""
    _holders: tuple[set[int], int] = field(default_factory=lambda: (set(), -1))
    """The hosts that had the newest checkpoint when they were last asked, and its update."""
    _looked_at: float = 0.0
    _saved: int = -1
    """Update of the newest checkpoint that was seen."""

    def __post_init__(self) -> None:
        self._order = sorted(self.members)
        self._candidates = Candidates(
            gathering=self.gathering,
            findings_on=self.findings_on,
            prepare=self._prepare,
            note=self.display.note,
            silence_s=self.limits.silence_s,
        )

    def run(self, plan: Plan) -> Result:
        """See ``ConnectedHosts.run``; hosts that have come too late to take part are told how the job ended, too."""
        try:
            return super().run(plan)
        finally:
            self.members |= self._candidates.all_members()

    def attempt(self, plan: Plan) -> Outcome:
        """Run the plan on the hosts that take part, and look for others meanwhile."""
        order, self._plan = list(self._order), plan
        self._note_absent()
        if plan.resume is not None:
            self._saved = max(self._saved, store.update_named(plan.resume))
        outcome = self._attempt(
            plan,
            members={place: self.members[node] for place, node in enumerate(order)},
            last_words=lambda place: self.gathering.last_words(order[place]),
            reform=self._why_reform,
            leaves=lambda place: self._leaves(order[place]),
        )
        self._saved = max(self._saved, outcome.saved)
        return outcome

    def change(self, outcome: Outcome) -> str:
        """Return which hosts are lost, leave, have come, or are left out."""
        if outcome.reformed:
            return outcome.reformed
        if hung := self._leave_out(outcome):
            return f"{self._name_hosts(hung)} left out: its ranks have hung {MAX_HANGS} times"
        lost = [self._order[place] for place in self._lost(outcome)]
        return outcome.judge().headline if lost else ""

    def newest(self) -> Path | None:
        """Return the newest checkpoint that any of the hosts has, and let the host that has it lead the ranks.

        Raises:
            LaunchError: the newest one that was written is on none of them.
        """
        nodes = sorted(self.members)
        answers = ask_all([self.members[node].channel for node in nodes], "newest", timeout_s=ASK_S)
        labels = [self.members[node].label for node in nodes]
        messages.show_warnings(list(zip(labels, answers, strict=True)), self._note_warning)
        found = {
            node: Path(each["checkpoint"]) for node, each in zip(nodes, answers, strict=True) if each.get("checkpoint")
        }
        best = max(map(store.update_named, found.values()), default=-1)
        # To begin anew, or from an older one, would train over updates that are only out of reach.
        if best < self._saved:
            raise LaunchError(
                f"the newest checkpoint, of update {self._saved}, is on none of the hosts that are there; start the host "
                "that has it, and go on with --resume, or let all hosts share the run folder"
            )
        holders = [node for node in nodes if node in found and store.update_named(found[node]) == best]
        # Rank 0 reads the checkpoint and sends it to ranks that lack it, so a host that has it comes first.
        held = set(holders)
        self._holders = held, best
        self._order = [*holders, *(node for node in nodes if node not in held)]
        return found[holders[0]] if holders else None

    def restore(self, plan: Plan, outcome: Outcome) -> None:
        """Drop hosts that are gone, take those that have come, and wait while there are too few.

        Raises:
            LaunchError: after ``back_s`` there are still fewer than the job needs, or none has its newest checkpoint.
        """
        self._drop_leaving()
        lost = [self._order[place] for place in self._lost(outcome)]
        self.gathering.let_go(lost)
        for node in lost:
            self.members.pop(node, None)
        self._forget_holders(lost)
        self._plan, began = plan, time.monotonic()
        while not self.end_requested():
            self._candidates.look(self._absent())
            self.members |= self._candidates.take()
            waited = time.monotonic() - began
            if not self._absent() or self._is_enough(waited, patience_s=0.0 if outcome.reformed else self.rejoin_s):
                return
            if waited > max(self.back_s, self.rejoin_s):
                raise LaunchError(self._too_few(waited))
            self._note_waiting()
            time.sleep(AGAIN_S / 2)

    def _is_enough(self, waited: float, *, patience_s: float) -> bool:
        """Return whether the job goes on with the hosts that are there, after waiting so long for the others."""
        if len(self.members) < self.fewest:
            return False
        # A host whose check is nearly over would otherwise cost a second start right after this one.
        if patience_s and self._candidates.checking:
            patience_s += CHECK_S
        none_comes = len(self._absent()) == len(self._candidates.unfit)
        return (waited >= patience_s or none_comes) and self._have_newest()

    def next_plan(self, plan: Plan, checkpoint: Path | None) -> Plan:
        """Return the plan of the next attempt on the hosts that take part."""
        return self.replan(plan, checkpoint, self._order)

    # --------------------------------------------------------------------------------------------- hosts that come, or go
    def _why_reform(self, outcome: Outcome) -> str:
        """Look for hosts now and then; return who has come or leaves, once the job is to be started again with them."""
        if self._leaving:
            return f"{self._name_hosts(self._leaving)} asked to end, and leaves"
        now, candidates = time.monotonic(), self._candidates
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            candidates.look(self._absent())
        # A start is let through to its first update, or a host that comes and goes would end each one before anything is
        # made.
        fitting = candidates.fitting if self._is_under_way(outcome) else []
        if fitting and (len(fitting) == len(self._absent()) or self._have_come()):
            return f"{self._name_hosts(fitting)} here"
        return ""

    @staticmethod
    def _is_under_way(outcome: Outcome) -> bool:
        """Return whether an attempt has made an update, or has trained for so long that not every update is recorded."""
        began = outcome.started_at
        return outcome.has_updated or (began is not None and time.monotonic() - began > PUT_OFF_S)

    def _have_come(self) -> bool:
        """Return whether those that have come are no longer kept waiting for others, which come after them."""
        candidates = self._candidates
        now, (first, last) = candidates.clock(), candidates.fitting_since
        waited = now - first
        if waited > PUT_OFF_S:
            return True
        if candidates.checking and waited <= CHECK_S:
            return False  # Each new start of the job costs all of its hosts some work.
        return now - last > SETTLE_S

    def _prepare(self, member: Member) -> None:
        """Prepare a host that has come."""
        # A former agent there may need some time to let the run folder go.
        plan, wait_s = self._plan, self.limits.silence_s
        assert plan is not None
        with self._packing:  # All that come during an attempt receive the same files.
            if self._pack is None or self._pack[0] is not plan:
                self._pack = plan, messages.pack_files(self.files(plan))
            files = self._pack[1]
        prepare({member.node: member}, plan, files, cwd=self.cwd, wait_s=wait_s)

    def _leaves(self, node: int) -> bool:
        """Return whether the job can go on without a host that was asked to end; note that it leaves."""
        if len(self._order) - len({*self._leaving, node}) < self.fewest or self.requests.any():
            return False
        self._leaving.add(node)
        # A host that is asked to end again and again, as one that its owner needs, is left alone for longer each time.
        self._left[node] = self._left.get(node, 0) + 1
        self.gathering.leave_alone(node, seconds=LEFT_S * 2 ** (self._left[node] - 1))
        return True

    def _leave_out(self, outcome: Outcome) -> list[int]:
        """Leave hosts out whose ranks have hung again, where the job can go on without them; return them."""
        left = []
        for node in (self._order[place] for place in outcome.hung_nodes()):
            self._hung[node] = self._hung.get(node, 0) + 1
            if self._hung[node] >= MAX_HANGS and len(self._order) - len({*self._leaving, node}) >= self.fewest:
                self._leaving.add(node)
                self.gathering.leave_alone(node, seconds=HUNG_S)
                left.append(node)
        return left

    def _drop_leaving(self) -> None:
        left = [node for node in self._leaving if node in self.members]
        text = "this host has left the job, which goes on without it"
        for node in left:
            member = self.members.pop(node)
            member.channel.send(Farewell(code=EXIT_CODES[signal.SIGTERM], text=text).message())
        self.gathering.let_go(left)
        self._forget_holders(left)
        self._leaving = set()

    def _forget_holders(self, gone: Iterable[int]) -> None:
        # A host that comes back may have been replaced by a machine without the checkpoint.
        held, update = self._holders
        self._holders = held.difference(gone), update

    # ------------------------------------------------------------------------------------------------- what is waited for
    def _note_absent(self) -> None:
        """Say that the job runs without some of its hosts."""
        absent = self._absent()
        if absent:
            names = self._name_hosts(absent, verb=False)
            them = "it" if len(absent) == 1 else "them"
            self._note_once(f"the job runs without {names}, and goes on with {them} once there again")

    def _note_waiting(self) -> None:
        """Say which hosts a job that cannot run waits for, and why."""
        names, patience_s = self._name_hosts(self._absent(), verb=False), self.rejoin_s
        why = ""
        if len(self.members) < self.fewest:
            why, patience_s = f" (it needs {self.fewest} hosts: cluster.min_nodes)", max(self.back_s, self.rejoin_s)
        elif not self._have_newest():
            why, patience_s = " (its newest checkpoint is there)", max(self.back_s, self.rejoin_s)
        self._note_once(f"the job waits for {names}{why}, for up to {patience_s:.0f} s")

    def _note_warning(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            self.display.note(text)

    def _note_once(self, text: str) -> None:
        if text != self._waits:
            self._waits = text
            self.display.note(text)

    # ----------------------------------------------------------------------------------------------------------- questions
    def _absent(self) -> list[int]:
        return [node for node in self.all_nodes if node not in self.members]

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
        holders, update = self._holders
        if update >= self._saved and any(node in self.members and not self._is_gone(node) for node in holders):
            return True  # All hosts would be asked again at each look.
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
            f"(cluster.min_nodes); missing: {self._name_hosts(self._absent(), verb=False)}"
            f"{''.join(f'; {problem}' for problem in self._candidates.problems())}; go on with --resume"
        )

    def _name_hosts(self, nodes: Iterable[int], *, verb: bool = True) -> str:
        names = [self.members[node].label if node in self.members else self.names[node] for node in sorted(nodes)]
        return few(names) + (f" {'is' if len(names) == 1 else 'are'}" if verb else "")
