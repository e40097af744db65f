"""Hosts that have come to an elastic job and do not take part yet: what is expected of each, and what their checks have shown.

A reason that keeps a host out may pass by itself: a former process there still holds the run folder, a disk is full, a
port is taken. So a host that does not fit stays connected and is checked again, after a pause that grows. Whoever
started it by hand reads there what it waits for.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.errors import MtrainError
from mtrain.jobs.hosts.hosts import Gathering, Member
from mtrain.jobs.preflight import findings
from mtrain.jobs.preflight.findings import Finding
from mtrain.spec.hostnames import few

FIRST_PAUSE_S = 5.0
"""Seconds after which a host that does not fit is checked again; each further pause is twice as long."""
MAX_PAUSE_S = 120.0
"""Longest pause."""
MAX_CHECKING = 32
"""Most hosts that are checked at once; the others wait for their turn, where hundreds come together."""


@dataclass(kw_only=True)
class _Candidate:
    """A host that has come."""

    member: Member
    pause_s: float = FIRST_PAUSE_S
    again_at: float = 0.0
    """When it is checked again, in the time of the clock; only where it did not fit."""
    checking: bool = False
    """Whether a thread checks it, or will."""
    waits: bool = False
    """Whether no thread checks it yet."""
    problems: list[Finding] | None = None
    """What keeps it from taking part; empty: nothing; None: no check has ended since it began."""
    concluded: bool = False
    """Whether ``problems`` were told."""
    concluded_at: float = 0.0
    """When that was, in the time of the clock."""

    @property
    def fits(self) -> bool:
        return self.concluded and not self.problems

    @property
    def is_unfit(self) -> bool:
        return self.concluded and bool(self.problems)


@dataclass(kw_only=True)
class Candidates:
    """The hosts that have come and do not take part yet. Call it from the main thread."""

    gathering: Gathering
    findings_on: Callable[[Member], list[Finding]]
    """Returns what keeps a host from taking part; it runs in a thread."""
    prepare: Callable[[Member], None]
    """Prepares a host for the job, in the same thread; it may raise any exception."""
    note: Callable[[str], None]
    """Shows the user of this process a line."""
    silence_s: float
    """Seconds of silence after which a host is lost."""
    clock: Callable[[], float] = time.monotonic
    _by_node: dict[int, _Candidate] = field(default_factory=dict)
    _noted: dict[int, list[Finding]] = field(default_factory=dict)
    """By host: what was last shown about it here."""

    def look(self, absent: Sequence[int]) -> None:
        """Ask for the hosts ``absent``, check those that have come, and forget those that are gone again."""
        arrived = self.gathering.arrivals([node for node in absent if node not in self._by_node])
        for node, member in arrived.items():
            member.channel.silence_s = self.silence_s
            self._by_node[node] = _Candidate(member=member)
            self._begin(self._by_node[node])
        gone: list[int] = []
        concluded: list[_Candidate] = []
        places = MAX_CHECKING - sum(each.checking and not each.waits for each in self._by_node.values())
        for node, candidate in self._by_node.items():
            if candidate.is_unfit and self.clock() >= candidate.again_at:
                self._begin(candidate)
            # Hundreds may come together, and each check is a thread that hashes files there and waits for answers here.
            if candidate.waits and places > 0:
                places -= 1
                self._check(candidate)
            if candidate.checking:
                continue
            if candidate.member.channel.lost is not None:
                gone.append(node)
            elif not candidate.concluded:
                concluded.append(candidate)
                self._conclude(candidate)
        for node in gone:
            del self._by_node[node]
        self.gathering.let_go(gone)
        self._note_refused([candidate for candidate in concluded if candidate.problems])

    @property
    def fitting(self) -> list[int]:
        """Return the hosts that can take part."""
        return [node for node, candidate in self._by_node.items() if candidate.fits]

    @property
    def fitting_since(self) -> tuple[float, float]:
        """Return when the first and the last one of ``fitting`` were found to fit, in the time of the clock; 0: there is none."""
        times = [candidate.concluded_at for candidate in self._by_node.values() if candidate.fits] or [0.0]
        return min(times), max(times)

    @property
    def unfit(self) -> list[int]:
        """Return the hosts that do not fit at present."""
        return [node for node, candidate in self._by_node.items() if candidate.is_unfit]

    @property
    def checking(self) -> bool:
        """Return whether a host is being checked."""
        return any(candidate.checking for candidate in self._by_node.values())

    def problems(self) -> list[str]:
        """Return why hosts do not fit at present, what many have in common once."""
        return [finding.line() for finding in _in_few([self._noted[node] for node in self.unfit])]

    def take(self) -> dict[int, Member]:
        """Return the hosts that can take part; they are candidates no longer."""
        taken = {node: self._by_node.pop(node).member for node in self.fitting}
        for node in taken:
            self._noted.pop(node, None)
        return {node: member for node, member in taken.items() if member.channel.lost is None}

    def all_members(self) -> dict[int, Member]:
        """Return all hosts that have come and do not take part yet."""
        return {node: candidate.member for node, candidate in self._by_node.items()}

    def _begin(self, candidate: _Candidate) -> None:
        candidate.checking, candidate.concluded, candidate.problems, candidate.waits = True, False, None, True
        _tell(candidate.member, "the job runs on its other hosts; this one is being checked")

    def _check(self, candidate: _Candidate) -> None:
        """Start the thread that checks a host."""
        candidate.waits = False
        threading.Thread(target=self._examine, args=(candidate,), daemon=True).start()

    def _examine(self, candidate: _Candidate) -> None:
        member = candidate.member
        try:
            problems = self.findings_on(member)
            if not problems:
                self.prepare(member)
        except Exception as error:  # The job that runs must not end because of a host that comes.
            text = (str(error) or type(error).__name__).removeprefix(f"{member.label}: ")
            problems = [Finding(check="start", state="bad", hosts=(member.label,), text=text)]
        candidate.problems = problems
        candidate.checking = False

    def _conclude(self, candidate: _Candidate) -> None:
        """Tell a host what its check has shown."""
        member, candidate.concluded, candidate.concluded_at = candidate.member, True, self.clock()
        if not candidate.problems:
            _tell(member, "this host takes part as soon as the other hosts have saved their state")
            return
        reason = "; ".join(problem.line() for problem in candidate.problems)
        candidate.again_at = self.clock() + candidate.pause_s
        _tell(
            member, f"this host cannot take part at present: {reason}; it is checked again in {candidate.pause_s:.0f} s"
        )
        candidate.pause_s = min(2 * candidate.pause_s, MAX_PAUSE_S)  # What does not pass soon seldom passes by itself.

    def _note_refused(self, refused: Sequence[_Candidate]) -> None:
        """Show the user of this process what keeps hosts from taking part, unless it was shown before."""
        news = {
            each.member.label: each.problems or []
            for each in refused
            if self._noted.get(each.member.node) != each.problems
        }
        self._noted |= {each.member.node: each.problems or [] for each in refused}
        if news:
            reasons = "; ".join(finding.line() for finding in _in_few(list(news.values())))
            them = "it is" if len(news) == 1 else "they are"
            self.note(
                f"{few(list(news))} cannot take part at present: {reasons}; {them} checked again from time to time"
            )


def _in_few(problems: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the problems of several hosts, what many have in common once."""
    return findings.in_short(findings.merge_findings([finding for each in problems for finding in each]))


def _tell(member: Member, text: str) -> None:
    """Show a line at a host, if somebody started it there by hand."""
    member.channel.send({"do": "note", "text": text})


# The requirements on a host follow from a plan of the whole job, and hundreds of hosts may come back together. A plan of
# all hosts for each of them would be the square of their number, so hosts that are alike share one.
Required = Mapping[str, Any]
"""The requirements on one host, as ``preflight.requirements`` returns them."""


REFUSAL_S = 5.0
"""Seconds for which no other plan is tried where there is none: a host that does not answer, or a name that is not known, may be
the reason, and both may pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    """Why there is no plan, and until when that counts."""

    error: MtrainError
    until: float


@dataclass(kw_only=True)
class ExpectedHosts:
    """Knows the requirements on each host of the job; threads may ask."""

    required: Callable[[Mapping[int, Member], Member], Sequence[Required]]
    """Makes a plan of all hosts from those that take part and one that has come; returns the requirements on each. Hosts that
    are missing are taken to be like the one that has come."""
    address_of: Callable[[Member], str] = lambda member: member.host
    """Returns the address by which ranks know a host, which the plan of another does not know; raises ``MtrainError`` where
    nobody knows it."""
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taking_part: frozenset[int] = frozenset()
    """The hosts that took part when ``_known`` was found."""
    _known: dict[Any, Sequence[Required] | _Refusal] = field(default_factory=dict)
    """By what a plan uses of a host: the requirements on all, or why there is no plan."""

    def of(self, member: Member, *, among: Mapping[int, Member]) -> Required:
        """Return the requirements on a host that has come to those that take part.

        Raises:
            MtrainError: there is no plan with this host.
        """
        address = self.address_of(member)
        members = dict(among)
        with self._lock:  # Those that come together wait for the one plan that all of them need.
            if self._taking_part != members.keys():
                self._taking_part = frozenset(members)
                self._known.clear()
            kind = _what_a_plan_uses(member)
            known = self._known.get(kind)
            if known is None or (isinstance(known, _Refusal) and self.clock() >= known.until):
                known = self._known[kind] = self._require(members, member)
        if isinstance(known, _Refusal):
            raise known.error
        here = {member.host, *(each.host for each in members.values())}
        required = known[member.node]
        # Names of hosts that are not there may mean nothing at present, and the host would wait for them.
        names = [name for name in required["names"] if name in here]
        return {**required, "address": address, "names": list(dict.fromkeys([*names, address]))}

    def _require(self, members: Mapping[int, Member], member: Member) -> Sequence[Required] | _Refusal:
        try:
            return self.required(members, member)
        except MtrainError as error:
            return _Refusal(error=error, until=self.clock() + REFUSAL_S)


def _what_a_plan_uses(member: Member) -> Any:
    """Return what a plan of all hosts uses of what one of them has told, beside its addresses."""
    # Ranks follow from devices, and devices from these two. Addresses are put in afterwards.
    return int(member.hello["devices"]), bool(member.hello["hidden"])
