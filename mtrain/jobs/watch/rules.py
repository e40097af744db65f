"""The rules that tell a hang from work: pure functions of what was seen, and when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtrain.jobs.watch.looks import INTERVAL_S, STARTER, RankLook

STALE_S = 3 * INTERVAL_S
"""Seconds after which a look counts no longer: a host that has nothing to say of its ranks says nothing."""
SLOWEST = 10
"""A job is slow once it takes so many times as long as it ever took between two signs of progress."""
MAX_PATIENCE_S = 600.0

Kind = Literal["stopped", "still", "slow", "lock"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """After how many seconds something is said, see ``cluster.hangs`` in the spec; None: never."""

    stopped_s: float | None = 10.0
    still_s: float | None = 45.0
    slow_s: float | None = 60.0
    lock_s: float | None = 20.0
    asked_s: float | None = None
    """After how long of stillness ranks are asked where they are, for the case that an exchange of theirs gives up; None: when
    it is said."""
    cpu_tells: bool = True
    """Whether a rank that waits for others takes no processor time. False: it polls, so that waiting looks like work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """How a job is watched: a part of its plan."""

    times: Times = field(default_factory=Times)
    end_s: float | None = None
    """Seconds after which a job is ended in which certainly nothing moves; None: never."""
    counts_output: bool = False
    """Whether what ranks print is progress, as of a script; else records alone are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, or seems to be."""

    kind: Kind
    since: float
    """When it began, in the time of whoever looks."""
    ranks: tuple[int, ...] = ()
    """The ranks that were seen to be the cause; empty: that must be asked."""
    where: str = ""
    """The lock, where it is one."""
    usual_s: float = 0.0
    """The longest time between two signs of progress so far."""

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Return what makes it the same finding at a later time."""
        return self.kind, self.ranks


@dataclass(slots=True)
class _Rank:
    look: RankLook
    seen_at: float = float("-inf")
    idle_since: float | None = None
    stopped_since: float | None = None


@dataclass(slots=True)
class Rules:
    """The rules, applied to the looks at the ranks of all hosts. All times are of one clock, and never go back."""

    times: Times
    size: int
    """Number of ranks."""
    began: float
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _living: dict[int, _Rank] = field(default_factory=dict)
    """The same of the last looks at which they lived."""
    _progress_at: float = 0.0
    _slowest_s: float = 0.0
    _has_progressed: bool = False
    _patience_s: float = 0.0
    """For how long all ranks were idle before and went on by themselves, twice."""
    _locks: tuple[str, ...] = ()
    _denied: tuple[str, ...] = ()
    _turned_at: float = 0.0

    def __post_init__(self) -> None:
        self._progress_at = self._turned_at = self.began

    def note_progress(self, now: float, *, within_s: float = 0.0) -> None:
        """Note a sign of progress, a record or a line that a script has printed; it came within the last ``within_s``."""
        if self._has_progressed:
            self._slowest_s = max(self._slowest_s, now - within_s - self._progress_at)
        self._end_stillness(now)
        self._progress_at, self._has_progressed = max(now, self._progress_at), True

    def take(self, message: Mapping[str, Any], ranks: Sequence[int], now: float) -> None:
        """Take the "look" event of a host that has ``ranks``."""
        if message["paused"]:
            self._forget(now)
        if message["grew"]:
            self.note_progress(now, within_s=float(message["span_s"]))
        self._locks = tuple(message["locks"])
        seen = {int(look["rank"]): RankLook(**look) for look in message["ranks"]}
        wanted = [*ranks, *(rank for rank in seen if rank == STARTER)]
        if any(rank not in seen or not seen[rank].idle for rank in ranks):
            self._end_stillness(now)
        for rank in wanted:
            look = seen.get(rank) or RankLook(rank=rank)
            former = self._ranks.get(rank)
            fresh = former is not None and now - former.seen_at <= STALE_S
            began = now - float(message["span_s"])
            self._ranks[rank] = _Rank(
                look,
                now,
                _since(former.idle_since if fresh and former else None, is_so=look.idle, now=began),
                _since(former.stopped_since if fresh and former else None, is_so=look.stopped > 0, now=now),
            )
            if look.state:
                self._living[rank] = self._ranks[rank]

    def find(self, now: float) -> list[Finding]:
        """Return what is wrong now, what is certain first."""
        if now - self._turned_at > STALE_S:  # this process was suspended, or its machine was
            self._forget(now)
        self._turned_at = now
        return [*self._find_lock(now), *self._find_stopped(now)] or [*self._find_still(now), *self._find_slow(now)]

    def is_early(self, now: float) -> bool:
        """Return whether ranks are to be asked where they are, though nothing is said yet: one waits, others may compute."""
        asked_s, fresh = self.times.asked_s, self._fresh(now)
        idle = [known.idle_since for known in fresh if known.idle_since is not None]
        if asked_s is None or not idle or any(known.look.traced for known in fresh):
            return False
        return now - max(self._progress_at, min(idle)) >= asked_s

    def state(self, rank: int, *, before_end: bool = False) -> tuple[RankLook, float | None]:
        """Return the last look at a rank, and since when it, or a child of it, was seen to be stopped; None: it is not.

        Args:
            rank: which one.
            before_end: of a rank that has ended, the last look before that.
        """
        known = (self._living if before_end else self._ranks).get(rank, _Rank(RankLook(rank=rank)))
        return known.look, known.stopped_since

    def still_since(self, now: float) -> float | None:
        """Return since when all ranks are idle and nothing has shown progress; None: that is not so."""
        if any(known.look.traced for known in self._fresh(now)):
            return None
        since = self._progress_at
        for rank in range(self.size):
            known = self._ranks.get(rank)
            if known is None or now - known.seen_at > STALE_S or known.idle_since is None:
                return None
            since = max(since, known.idle_since)
        return None if all(known.look.state == "" for known in self._fresh(now)) else since

    # --------------------------------------------------------------------------------------------------------- the rules
    def _find_stopped(self, now: float) -> list[Finding]:
        if self.times.stopped_s is None:
            return []
        since = {known.look.rank: known.stopped_since for known in self._fresh(now) if known.stopped_since is not None}
        late = sorted(rank for rank, at in since.items() if now - at >= self.times.stopped_s)
        return [Finding(kind="stopped", since=min(since[rank] for rank in late), ranks=tuple(late))] if late else []

    def _find_still(self, now: float) -> list[Finding]:
        since, still_s = self.still_since(now), self.times.still_s
        if since is None or still_s is None:
            return []
        patience_s = max(still_s, min(self._patience_s, MAX_PATIENCE_S))
        return [Finding(kind="still", since=since)] if now - since >= patience_s else []

    def _find_slow(self, now: float) -> list[Finding]:
        slow_s = self.times.slow_s
        quiet_s = now - self._progress_at
        if slow_s is None or self.size < 2 or quiet_s < max(slow_s, SLOWEST * self._slowest_s):
            return []
        fresh = [known for known in self._fresh(now) if known.look.rank != STARTER]
        if any(known.look.traced or known.look.builds for known in fresh):
            return []
        waiting = [known for known in fresh if known.idle_since is not None and now - known.idle_since >= slow_s / 2]
        if self.times.cpu_tells and not 0 < len(waiting) < self.size:
            return []
        return [Finding(kind="slow", since=self._progress_at, usual_s=self._slowest_s)]

    def _find_lock(self, now: float) -> list[Finding]:
        since, lock_s = self.still_since(now), self.times.lock_s
        builds = any(known.look.builds for known in self._fresh(now))
        if since is None or lock_s is None or builds or not self._locks or now - since < lock_s:
            return []
        return [] if self._locks == self._denied else [Finding(kind="lock", since=since, where=self._locks[0])]

    def deny_lock(self) -> None:
        """Note that ranks wait for something else than the locks that exist."""
        self._denied = self._locks

    # ------------------------------------------------------------------------------------------------------------- parts
    def _fresh(self, now: float) -> Sequence[_Rank]:
        return [known for known in self._ranks.values() if now - known.seen_at <= STALE_S]

    def _end_stillness(self, now: float) -> None:
        """Learn from ranks that go on by themselves how long they may be idle."""
        since = self.still_since(now)
        if since is not None and not any(known.look.stopped for known in self._fresh(now)):
            self._patience_s = max(self._patience_s, 2 * (now - since))

    def _forget(self, now: float) -> None:
        """Begin anew: what was seen before says nothing of now."""
        self._ranks.clear()
        self._living.clear()
        self._progress_at = now


def _since(former: float | None, *, is_so: bool, now: float) -> float | None:
    if not is_so:
        return None
    return now if former is None else former
