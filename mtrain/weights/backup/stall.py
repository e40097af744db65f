"""Notice work that makes no progress, on a busy host too."""

import threading
from collections.abc import Callable
from typing import Any

LOOKS = 20
"""Looks in the time after which work counts as stalled."""


class StallWatch:
    """Calls ``give_up`` when nothing has moved for ``timeout_s`` seconds, from a thread of its own.

    The looks are counted, not the time: while the process is stopped, or gets no processor, nobody looks.
    """

    def __init__(self, timeout_s: float, give_up: Callable[[], None]) -> None:
        self._pause_s = timeout_s / LOOKS
        self._give_up = give_up
        self._ended = threading.Event()
        self._idle_looks = 0

    def __enter__(self) -> "StallWatch":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()

    def moved(self) -> None:
        """Learn that the work goes on."""
        self._idle_looks = 0

    def look(self) -> bool:
        """Return whether nothing has moved for so many looks that the work has stalled."""
        self._idle_looks += 1
        return self._idle_looks > LOOKS

    def _watch(self) -> None:
        while not self._ended.wait(self._pause_s):
            if self.look():
                self._give_up()
                return
