"""The watch over one attempt of a job: it takes what the hosts see, has ranks asked where they are, and says what is wrong."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.jobs.watch.looks import STARTER
from mtrain.jobs.watch.places import Place, is_exchange
from mtrain.jobs.watch.report import Report, Seen, describe, name_ranks
from mtrain.jobs.watch.rules import Finding, Rules, Watching

ANSWER_S = 12.0
"""Seconds in which hosts answer where their ranks are; what has not come by then is left out."""
TURN_S = 1.0
"""Seconds between two applications of the rules."""
TIMEOUT = re.compile(
    r"time[d]?[ -]?out|has been shut down|another rank has ended, or is unreachable|did not reach|Watchdog caught",
    re.IGNORECASE,
)
"""What errors say of a rank whose patience with the others has ended."""
INNERMOST = 4
"""How many of the innermost calls of an error may be the collective that has timed out."""
_FILES = re.compile(r'^\s*File "(.+?)", line', re.MULTILINE)


@dataclass(kw_only=True)
class Watch:
    """Watches the ranks of an attempt. The caller passes everything on, and does what is returned."""

    watching: Watching
    ranks: Mapping[int, range]
    """Host -> its ranks."""
    labels: Mapping[int, str]
    """Host -> its name for messages; empty if the job has only this one."""
    clock: Callable[[], float]
    wall: Callable[[], float]
    """The time of day."""
    _places: dict[int, Place] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    """Hosts that were asked and have not answered."""
    _asked_at: float | None = None
    _asks: int = 0
    _was_asked_early: bool = False
    _is_early: bool = False
    _said: dict[tuple[str, tuple[int, ...]], Finding] = field(default_factory=dict)
    _report: Report | None = None
    _missing: tuple[int, ...] = ()
    _failed: bool = False
    _found: Sequence[Finding] = ()
    _turned_at: float = float("-inf")

    def __post_init__(self) -> None:
        size = sum(len(ranks) for ranks in self.ranks.values())
        self.rules = Rules(times=self.watching.times, size=size, began=self.clock())

    @property
    def report(self) -> Report | None:
        """Return what was said last of a hang that lasts; None: the ranks go on."""
        return self._report

    def take(self, node: int, message: Mapping[str, Any]) -> None:
        """Take a "look" or a "places" event of a host."""
        if message["event"] == "look" and self._failed:
            return  # Ranks end now, and what they look like says nothing of before.
        if message["event"] == "look":
            self.rules.take(message, self.ranks[node], self.clock())
        elif message.get("ask") == self._asks:
            self._places |= {int(rank): Place.of(place) for rank, place in message["places"].items()}
            self.take_missing(message["missing"])
            self._open.discard(node)

    def take_missing(self, ranks: Sequence[int]) -> None:
        """Take the ranks that do not come as Horovod says."""
        self._missing = self._missing or tuple(int(rank) for rank in ranks)

    def fail(self, failure: Mapping[str, Any]) -> bool:
        """Note that a rank has failed; return whether the others are to be asked where they are before they are ended."""
        is_first, self._failed = not self._failed, True
        return is_first and not self._places and _has_waited(failure)

    def note_progress(self) -> None:
        """Note that a record has come."""
        self.rules.note_progress(self.clock())

    def ask(self, nodes: Sequence[int]) -> dict[str, Any]:
        """Return the message that asks hosts where their ranks are."""
        self._asks += 1
        self._open, self._asked_at, self._places = set(nodes), self.clock(), {}
        return {"do": "places", "ask": self._asks}

    def wants_places(self) -> bool:
        """Return whether hosts are to be asked now."""
        self._turn()
        if self._asked_at is not None:
            return False
        if any(finding.key not in self._said for finding in self._found):
            return True
        is_early = self._is_early
        if not is_early and not self._said:
            self._places = {}  # They would be told of a later hang.
        wants, self._was_asked_early = is_early and not self._was_asked_early, is_early
        return wants

    def find_report(self) -> Report | None:
        """Return what is to be said once the hosts have answered; None: nothing, or not yet."""
        now = self.clock()
        if self._asked_at is None or (self._open and now - self._asked_at < ANSWER_S):
            return None
        self._asked_at, self._turned_at, self._found = None, now, self.rules.find(now)
        new = [finding for finding in self._found if finding.key not in self._said]
        if any(finding.kind == "lock" for finding in new) and not self._is_lock():
            self.rules.deny_lock()
            self._found = self.rules.find(now)
            return None
        if not new:
            return None
        self._said |= {finding.key: finding for finding in new}
        self._report = describe(new[0], self._seen(), at=self._at, now=now)
        return self._report

    def has_gone_on(self) -> bool:
        """Return whether the ranks go on of which something was said; afterwards it is forgotten."""
        if not self._said or self._asked_at is not None or self._found:
            return False
        self._said, self._report = {}, None
        return True

    def is_over(self) -> bool:
        """Return whether the job is to be ended, because it has hung for too long."""
        end_s, now = self.watching.end_s, self.clock()
        if end_s is None or self._report is None or not self._report.may_end:
            return False
        # What is so now counts: a long computation may have come before, and was said too.
        return any(now - finding.since >= end_s for finding in self._found if finding.kind in ("stopped", "still"))

    def explain(self, failure: Mapping[str, Any]) -> Report | None:
        """Return which ranks did not come, if the failure of a rank tells that its patience has ended; None: unknown."""
        if not _has_waited(failure):
            return None
        waited = int(failure.get("rank", -1))
        # The starter ends the others after it; what counts is what they did before.
        others = {rank: seen for rank, seen in self._seen(before_end=True).items() if rank != waited}
        finding = Finding(kind="still", since=self.clock())
        report = describe(finding, others, at=self._at, now=self.clock())
        if report.suspects:
            return report
        missing = tuple(rank for rank in self._missing if rank != waited)
        if missing and len(missing) < self.rules.size:
            return Report(kind="still", suspects=missing, cause=f"{name_ranks(missing)} did not come, as Horovod says")
        return None

    # ------------------------------------------------------------------------------------------------------------- parts
    def _turn(self) -> None:
        """Apply the rules if it is time."""
        now = self.clock()
        if now - self._turned_at >= TURN_S:
            self._turned_at, self._found = now, self.rules.find(now)
            self._is_early = self.rules.is_early(now)

    def _is_lock(self) -> bool:
        """Return whether all ranks wait for the lock of a build."""
        return len(self._places) == self.rules.size and all(place.kind == "lock" for place in self._places.values())

    def _seen(self, *, before_end: bool = False) -> dict[int, Seen]:
        hosts = {rank: self.labels[node] for node, ranks in self.ranks.items() for rank in ranks}
        hosts |= {STARTER: ""} if self.rules.state(STARTER)[0].stopped else {}
        seen = {}
        for rank, host in sorted(hosts.items()):
            look, since = self.rules.state(rank, before_end=before_end)
            seen[rank] = Seen(
                look=look,
                host=host,
                stopped_at="" if since is None else self._at(since),
                place=self._places.get(rank),
            )
        return seen

    def _at(self, moment: float) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self.wall() - (self.clock() - moment)))


def _has_waited(failure: Mapping[str, Any]) -> bool:
    """Return whether a failure tells that a rank's patience with the others has ended, and not that with a download of its own."""
    files = _FILES.findall(str(failure.get("traceback", "")))[-INNERMOST:]
    is_timeout = TIMEOUT.search(str(failure.get("error"))) is not None
    return is_timeout and (not files or any(map(is_exchange, files)))
