"""How many micro batches a loader prepares ahead: as many as cover a time, measured by how fast they are used.

A fixed number is too small where updates are fast, because one slow read of a disk then stops the device, and needless
memory where they are slow.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Literal

Prefetch = int | Literal["auto"]
"""Number of micro batches prepared ahead; auto: as many as cover :data:`COVERED_S`."""
COVERED_S = 2.0
"""Seconds of use that the micro batches ahead should last for."""
LEAST, MOST = 4, 64
"""Smallest and largest number of micro batches ahead, where memory allows."""
REMEMBERED = 15
"""Number of latest updates whose times are looked at. Their median ignores pauses, such as an evaluation."""


class Ahead:
    """Number of micro batches to prepare ahead, from the times between receiving one and asking for the next."""

    def __init__(
        self, given: Prefetch, *, most: int, accumulate: int = 1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``most``: largest number that ``auto`` may reach. ``accumulate``: micro batches in an update."""
        self._is_measured = not isinstance(given, int)
        self.most = given if isinstance(given, int) else most
        """Largest number that ``count`` reaches."""
        self._clock = clock
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._received: float | None = None
        self._accumulate, self._used, self._spent = accumulate, 0, 0.0
        self.count = given if isinstance(given, int) else min(LEAST, most)

    def ask(self) -> None:
        """Note that the next micro batch is asked for, and decide anew."""
        if not self._is_measured or self._received is None:
            return
        self._spent += self._clock() - self._received
        self._used += 1
        # Whole updates are timed: a device computes while the program already
        # asks for the next micro batch, and makes it wait once in an update.
        if self._used == self._accumulate:
            self._times.append(self._spent)
            self._used, self._spent = 0, 0.0
            needed = min(COVERED_S / max(median(self._times), 1e-9) * self._accumulate, MOST)
            self.count = min(max(math.ceil(needed), LEAST), self.most)

    def receive(self) -> None:
        """Note that a micro batch was received; the time spent on waiting for it does not count as use."""
        self._received = self._clock()

    def rest(self) -> None:
        """Note that the next micro batch, whenever it is asked for, belongs to another pass."""
        self._received, self._used, self._spent = None, 0, 0.0
