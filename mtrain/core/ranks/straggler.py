"""Find the ranks that the others wait for during training, from the seconds that each rank has waited.

A rank that is slower than the others comes last to every exchange: it waits for nobody, and all others wait for it. What the
exchange itself takes is in the waits of all, so only differences between ranks count. The ranks compare their waits every few
seconds, at updates that follow from numbers which all of them have. No collective of its own is needed: the waits ride in two
numbers of the vector that every update exchanges anyhow (``core.ranks.agreement``), those of ``GROUP`` ranks at a time, so that an
update costs the same with any number of ranks.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mtrain.core.ranks.agreement import NO_WAITS
from mtrain.core.ranks.traffic import sent_bytes

LEAST_GAP = 0.2
"""Least difference between the shares of time that stragglers and others wait. Even ranks differ by less, also where they share
cores."""
EVERY_S = 10.0
"""About so many seconds are between two looks."""
CONFIRM_S = 1.0
"""Least seconds of updates that a look judges, and about so many until it is confirmed by a second one."""
LEAST_UPDATES, MOST_UPDATES = 10, 1000
"""Fewest and most updates between two looks; the most bound the delay where updates become slower."""
DELAY = 2
"""Updates from the end of what a look judges to the first that carries it: the next one may have been sent already."""
GROUP, SHARE_BITS = 5, 10
"""Ranks whose shares one update carries, and bits of each: 50 bits are exact in a float64, also as a mean over ranks."""
MOST_NAMED = 8
"""Ranks that a sentence names; more are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What all ranks know after they have compared their waits."""

    shares: Sequence[float]
    """Share of the time that each rank has waited for others, by rank, in steps of a thousandth."""
    seconds: float
    """Seconds of an update, as mean over ranks."""
    sent_bytes: float | None
    """Bytes that this rank has sent over TCP per update; None: they are not counted."""
    slow: tuple[int, ...] = ()
    """Ranks that the others wait for, as two looks in a row have found."""
    sentence: str = ""
    """What to tell people, where ``slow`` has changed."""


def slowest(shares: Sequence[float], *, least_gap: float = LEAST_GAP) -> tuple[int, ...]:
    """Return the ranks that wait for less of their time than the others, by a gap of ``least_gap``; empty: there are none.

    At most half of the ranks are found, those below the largest gap: the ranks of one slow host are found together.
    """
    order = sorted(range(len(shares)), key=lambda rank: shares[rank])
    gaps = [(shares[order[count]] - shares[order[count - 1]], count) for count in range(1, len(order) // 2 + 1)]
    gap, count = max(gaps, default=(0.0, 0))
    return tuple(sorted(order[:count])) if gap >= least_gap else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """The updates that a look judges, on this rank."""

    first: int
    """The first update that carries what was measured."""
    updates: int
    seconds: float
    share: float
    sent_bytes: float | None
    shares: list[float]
    """Those of the ranks that are known already, by rank."""


class Stragglers:
    """Looks for stragglers on one rank; every rank must call its methods at the same updates."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        clock: Callable[[], float] = time.perf_counter,
        sent: Callable[[], int | None] = sent_bytes,
    ) -> None:
        """Judge nothing yet; ``sent``: see ``traffic.sent_bytes``."""
        self._rank = rank
        self._size = size
        self._clock = clock
        self._sent = sent
        self.hosts: Sequence[str] = ()
        """Name of each rank's host, for sentences; empty: they are not known."""
        self._before: tuple[float, float] | None = None
        """Time of the record before, and the seconds waited until then; None: what is since belongs to no update."""
        self._elapsed_s = self._waited_s = 0.0
        self._since: tuple[int, int | None] | None = None
        """The first update after the stretch before, and the bytes sent until then."""
        self._wait_updates = LEAST_UPDATES
        self._stretch: _Stretch | None = None
        """What is on its way to all ranks; None: nothing is."""
        self._look: Look | None = None
        """What was found since the record before."""
        self._suspects: tuple[int, ...] = ()
        self.slow: tuple[int, ...] = ()
        """Ranks that the others wait for."""

    def exclude(self) -> None:
        """Leave out what is between the records before and after this call: an evaluation, a checkpoint."""
        self._before = None

    def take(self, record: Mapping[str, Any]) -> Look | None:
        """Take the record of an update; return what was found since the one before, if the ranks have looked."""
        if "communication_s" not in record:
            return None
        now, waited_s, update = self._clock(), float(record["communication_s"]), int(record["update"])
        if self._before is not None:
            self._elapsed_s += now - self._before[0]
            self._waited_s += waited_s - self._before[1]
        self._before = now, waited_s
        if self._since is None:
            self._since = update, self._sent()
        # All ranks have the same counts, so all of them look, or none.
        elif self._stretch is None and update - self._since[0] >= self._wait_updates:
            self._stretch = self._end_stretch(self._since, update)
        look, self._look = self._look, None
        return look

    def _end_stretch(self, since: tuple[int, int | None], update: int) -> _Stretch:
        """Return the stretch that ends with ``update``, and begin the next one."""
        updates, before, sent = update - since[0], since[1], self._sent()
        stretch = _Stretch(
            first=update + DELAY,
            updates=updates,
            seconds=self._elapsed_s,
            share=min(max(self._waited_s / max(self._elapsed_s, 1e-9), 0.0), 1.0),
            # A connection that was closed takes its count along, so the difference may fall below 0.
            sent_bytes=None if sent is None or before is None else max(0, sent - before) / updates,
            shares=[],
        )
        self._since = update, sent
        self._elapsed_s = self._waited_s = 0.0
        return stretch

    def own_numbers(self, update: int) -> tuple[float, float]:
        """Return this rank's seconds of the stretch that is judged, and its share where it is its turn, for the vector of ``update``."""
        stretch = self._stretch
        if stretch is None or update < stretch.first:
            return NO_WAITS
        # Ranks have their turns in groups; within one, each writes a digit of its own of the number that is summed.
        place = self._rank - GROUP * (update - stretch.first)
        step = round(stretch.share * ((1 << SHARE_BITS) - 1))
        return stretch.seconds, float(step << SHARE_BITS * place) if 0 <= place < GROUP else 0.0

    def take_means(self, update: int, means: tuple[float, float]) -> None:
        """Take the means over ranks of what ``own_numbers`` has returned for ``update``; judge once all ranks are known."""
        stretch = self._stretch
        if stretch is None or update < stretch.first:
            return
        steps, most = round(means[1] * self._size), (1 << SHARE_BITS) - 1
        stretch.shares.extend((steps >> SHARE_BITS * place & most) / most for place in range(GROUP))
        if len(stretch.shares) >= self._size:
            self._look, self._stretch = self._judge(stretch, stretch.shares[: self._size], means[0]), None

    def _judge(self, stretch: _Stretch, shares: Sequence[float], elapsed_s: float) -> Look:
        # A stretch that is too short judges nobody: what was suspected before stays so.
        found = slowest(shares) if elapsed_s >= CONFIRM_S else self._suspects
        sentence = ""
        # Two looks in a row must agree before a rank is named: one may show a hiccup.
        if found == self._suspects and found != self.slow:
            sentence = self._sentence(found, shares)
            self.slow = found
        seconds = elapsed_s / stretch.updates
        self._suspects = found
        # A look that finds something new is repeated soon, to confirm or to drop it.
        pause_s = EVERY_S if found == self.slow else CONFIRM_S
        self._wait_updates = int(min(max(pause_s / max(seconds, 1e-9) + 1, LEAST_UPDATES), MOST_UPDATES))
        return Look(shares=shares, seconds=seconds, sent_bytes=stretch.sent_bytes, slow=self.slow, sentence=sentence)

    def _sentence(self, found: Sequence[int], shares: Sequence[float]) -> str:
        """Word the change from ``slow`` to ``found``."""
        if not found:
            return f"the ranks no longer wait for {_name_ranks(self.slow)}"
        several = len(set(self.hosts)) > 1
        owners = list(dict.fromkeys(self.hosts[rank] for rank in found)) if several else []
        where = f" ({', '.join(owners[:3])}{' ...' if len(owners) > 3 else ''})" if several else ""
        own = fmean(shares[rank] for rank in found)
        others = fmean(share for rank, share in enumerate(shares) if rank not in found)
        return (
            f"the other ranks wait for {_name_ranks(found)}{where}: they wait {100 * others:.0f} % of the time, "
            f"{'it' if len(found) == 1 else 'these'} {100 * own:.0f} %; look for other processes, a slow disk or a throttled "
            "processor there, or see where its time goes with report.profile"
        )


def _name_ranks(ranks: Sequence[int]) -> str:
    words = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED:,} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {words}{more}"
