"""Find the ranks that the others wait for during training, from the seconds that each rank has waited.

A rank that is slower than the others comes last to every exchange: it waits for nobody, and all others wait for it. What the
exchange itself takes is in the waits of all, so only differences between ranks count. The ranks exchange their waits every few
seconds, at updates that follow from numbers which all of them have, because no rank may call a collective alone.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from mtrain.core.interfaces import Collective
from mtrain.core.traffic import sent_bytes

LEAST_GAP = 0.2
"""Least difference between the shares of time that stragglers and others wait. Even ranks differ by less, also where they share
cores."""
EVERY_S = 10.0
"""About so many seconds are between two looks."""
CONFIRM_S = 1.0
"""Least seconds of updates that a look judges, and about so many until it is confirmed by a second one."""
LEAST_UPDATES, MOST_UPDATES = 10, 1000
"""Fewest and most updates between two looks; the most bound the delay where updates become slower."""
MOST_NAMED = 8
"""Ranks that a sentence names; more are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What all ranks know after they have exchanged their waits."""

    shares: Sequence[float]
    """Share of the time that each rank has waited for others, by rank."""
    seconds: float
    """Seconds of an update, those of the slowest rank."""
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


class Stragglers:
    """Looks for stragglers on one rank; every rank must call its methods at the same updates."""

    def __init__(
        self,
        collective: Collective,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sent: Callable[[], int | None] = sent_bytes,
        host: str | None = None,
    ) -> None:
        self._collective = collective
        self._clock = clock
        self._sent = sent
        self._host = socket.gethostname() if host is None else host
        self._before: tuple[float, float] | None = None
        """Time of the record before, and the seconds waited until then; None: what is since belongs to no update."""
        self._elapsed_s = self._waited_s = 0.0
        self._since: tuple[int, int | None] | None = None
        """The first update after the look before, and the bytes sent until then."""
        self._wait_updates = LEAST_UPDATES
        self._suspects: tuple[int, ...] = ()
        self.slow: tuple[int, ...] = ()
        """Ranks that the others wait for."""

    def exclude(self) -> None:
        """Leave out what is between the records before and after this call: an evaluation, a checkpoint."""
        self._before = None

    def updated(self, record: Mapping[str, Any]) -> Look | None:
        """Take the record of an update; return what was found, where the ranks look after this update."""
        if "communication_s" not in record:
            return None
        now, waited_s, update = self._clock(), float(record["communication_s"]), int(record["update"])
        if self._before is not None:
            self._elapsed_s += now - self._before[0]
            self._waited_s += waited_s - self._before[1]
        self._before = now, waited_s
        if self._since is None:
            self._since = update, self._sent()
        updates = update - self._since[0]
        # All ranks have the same counts, so all of them look, or none.
        return self._look(update, updates) if updates >= self._wait_updates else None

    def _look(self, update: int, updates: int) -> Look:
        assert self._since is not None
        sent, before = self._sent(), self._since[1]
        numbers = np.zeros((2, self._collective.size))
        numbers[:, self._collective.rank] = self._elapsed_s, self._waited_s
        elapsed_s, waited_s = self._collective.all_reduce(numbers, "sum")
        shares = [float(wait / max(seconds, 1e-9)) for wait, seconds in zip(waited_s, elapsed_s, strict=True)]
        found = slowest(shares) if max(elapsed_s) >= CONFIRM_S else self._suspects
        sentence = ""
        if found == self._suspects and found != self.slow:
            sentence = self._sentence(found, shares)
            self.slow = found
        seconds = float(max(elapsed_s)) / updates
        self._suspects, self._since = found, (update, sent)
        self._elapsed_s = self._waited_s = 0.0
        pause_s = EVERY_S if found == self.slow else CONFIRM_S
        self._wait_updates = int(min(max(pause_s / max(seconds, 1e-9) + 1, LEAST_UPDATES), MOST_UPDATES))
        return Look(
            shares=shares,
            seconds=seconds,
            sent_bytes=None if sent is None or before is None else max(0, sent - before) / updates,
            slow=self.slow,
            sentence=sentence,
        )

    def _sentence(self, found: Sequence[int], shares: Sequence[float]) -> str:
        """Word the change from ``slow`` to ``found``; every rank must call."""
        if not found:
            return f"the ranks no longer wait for {_named(self.slow)}"
        hosts = self._collective.all_gather(self._host)
        owners = list(dict.fromkeys(hosts[rank] for rank in found))
        where = f" ({', '.join(owners[:3])}{' ...' if len(owners) > 3 else ''})" if len(set(hosts)) > 1 else ""
        own = fmean(shares[rank] for rank in found)
        others = fmean(share for rank, share in enumerate(shares) if rank not in found)
        return (
            f"the other ranks wait for {_named(found)}{where}: they wait {100 * others:.0f} % of the time, "
            f"{'it' if len(found) == 1 else 'these'} {100 * own:.0f} %; look for other processes, a slow disk or a throttled "
            "processor there, or see where its time goes with report.profile"
        )


def _named(ranks: Sequence[int]) -> str:
    words = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED:,} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {words}{more}"
