"""The records of runs that pages show, shared by the threads that answer requests.

No thread waits long for another one: a long file is read in pieces, one for each request, and while one thread reads, the
others show what was there before.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from mtrain_ui.pages.folder import RunFiles
from mtrain_ui.pages.timeline import Follower, Timeline

MAX_FOLLOWED = 32
"""Runs whose records are kept in memory, those that were shown last."""
PIECE_BYTES = 16 << 20
"""Bytes of a file that one request reads."""
WAIT_S = 0.5
"""Seconds for which a request waits for another one that reads the same run."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The records of a run that have been read. They do not change any more."""

    timeline: Timeline
    read: int
    """Per cent of the file that have been read; 100: all of it."""


class Followers:
    """Follows the runs that were shown last. Several threads may call."""

    def __init__(self) -> None:
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self._lock = threading.Lock()

    def look(self, name: str, run: RunFiles) -> Shown:
        """Return what a run has recorded, after the next piece of it was read. ``name``: its name among the runs."""
        with self._lock:  # never held while a file is read
            followed = self._followed.pop(name, None) or _Followed(run)
            self._followed[name] = followed
            while len(self._followed) > MAX_FOLLOWED:
                self._followed.popitem(last=False)
        return followed.look()


class _Followed:
    """One run that is followed."""

    def __init__(self, run: RunFiles) -> None:
        self._follower = Follower(run)
        self._lock = threading.Lock()
        self._shown = Shown(Timeline(), 0)

    def look(self) -> Shown:
        if self._lock.acquire(timeout=WAIT_S):
            try:
                timeline = self._follower.refresh(limit=PIECE_BYTES)
                # Other threads draw what they were shown while this one goes on reading.
                self._shown = Shown(timeline.copy(), self._follower.read_percent)
            finally:
                self._lock.release()
        return self._shown
