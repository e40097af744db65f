"""Calls to a service that may be slow or down, in a thread of their own, so that training waits for none of them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mtrain.records.reporter import word_error

log = logging.getLogger(__name__)
Call = Callable[[], Any]
FIRST_PAUSE_S = 2.0
"""Seconds before a call that has failed is tried again; they double with each further failure."""
MAX_PAUSE_S = 60.0
MAX_WAITING = 2000
"""Most calls that wait; more are dropped, and counted."""


class Background:
    """Runs calls one after the other, first ``opening``.

    A call that fails because the service is down is tried again until it succeeds, and the calls behind it wait. If the
    service refuses ``opening``, nothing is called any more and ``refused`` has the error; another call that it refuses is
    dropped.
    """

    def __init__(self, opening: Call, *, is_down: Callable[[Exception], bool], first_pause_s: float = FIRST_PAUSE_S):
        self.refused: Exception | None = None
        self._is_down = is_down
        self._first_pause_s = first_pause_s
        self._calls: deque[Call] = deque([opening])
        self._changed = threading.Condition()
        self._has_opened, self._has_ended = False, False
        self._dropped = 0
        self._sentence, self._is_told = "", False
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def add(self, call: Call) -> None:
        """Add a call to the end of the queue."""
        with self._changed:
            # A service that is down for days must not fill the memory of the rank.
            if len(self._calls) >= MAX_WAITING:
                self._dropped += 1
                return
            self._calls.append(call)
            self._changed.notify_all()

    def take_sentence(self) -> str:
        """Return what went wrong, once for each kind of trouble; empty if nothing new did."""
        with self._changed:
            sentence, self._sentence = self._sentence, ""
            return sentence

    def close(self, timeout_s: float) -> int:
        """Wait until every call was made; return the number of those that were not, after ``timeout_s`` at most."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._calls and self.refused is None and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._has_ended = True
            self._changed.notify_all()
            return len(self._calls) + self._dropped

    def _run(self) -> None:
        pause_s = self._first_pause_s
        while call := self._next():
            try:
                call()
            except Exception as error:  # A foreign library may raise any exception.
                log.warning("a call to the service of a reporter has failed", exc_info=error)
                if self._is_down(error):
                    self._tell(
                        f"the service does not answer, and is tried again while the job goes on: {word_error(error)}"
                    )
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
                    continue
                if not self._has_opened:
                    self.refused = error
                else:
                    self._tell(f"the service refuses some of the records: {word_error(error)}")
            else:
                self._has_opened, pause_s = True, self._first_pause_s
            with self._changed:
                # Only now: a call that failed for want of the service is made again.
                self._calls.popleft()
                self._changed.notify_all()
                if self.refused is not None:
                    return

    def _next(self) -> Call | None:
        """Return the call that is due, once there is one; None at the end. It stays in the queue until it is made."""
        with self._changed:
            while not self._calls and not self._has_ended:
                self._changed.wait()
            return None if self._has_ended else self._calls[0]

    def _tell(self, sentence: str) -> None:
        """Keep a sentence for ``take_sentence``; the first one only, as the same trouble tends to stay."""
        with self._changed:
            if not self._is_told:
                self._sentence, self._is_told = sentence, True
