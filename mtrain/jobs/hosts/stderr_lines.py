"""The last lines that a command writes to its standard error, kept for the explanation of a failure."""

import os
import threading
from collections import deque

from mtrain.jobs.hosts.channel_thread import ChannelThread

MAX_LINES = 40
"""How many lines are kept."""
MAX_CHARACTERS = 500
"""How much is kept of each."""
TICK_S = 3600.0
_CHUNK_BYTES = 1 << 16


class StderrLines:
    """Reads one pipe to its end. The thread of a channel does so, see ``channel_thread.Served``."""

    def __init__(self, descriptor: int, *, thread: ChannelThread) -> None:
        self.incoming = descriptor
        self.outgoing: int | None = None
        self.is_over = False
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self._partial = b""
        self._finished = threading.Event()
        os.set_blocking(descriptor, False)
        thread.serve(self)

    def wait(self, timeout_s: float) -> None:
        """Wait until everything was read, or ``timeout_s`` seconds."""
        self._finished.wait(timeout_s)

    def tick(self, now: float) -> float:
        """Do nothing: nothing is ever due."""
        return now + TICK_S

    def read(self) -> None:
        """Read what the command has written."""
        try:
            content = os.read(self.incoming, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self.is_over = not content
        *lines, self._partial = (self._partial + content).split(b"\n")
        if self.is_over and self._partial:
            lines.append(self._partial)
        self._partial = self._partial[:_CHUNK_BYTES]
        self.lines.extend(line.decode(errors="replace").rstrip()[:MAX_CHARACTERS] for line in lines)

    def write(self) -> None:
        """Write nothing."""

    def fail(self, error: Exception) -> None:
        """Stop reading."""
        del error
        self.is_over = True

    def finish(self) -> None:
        """Close the pipe."""
        os.close(self.incoming)
        self._finished.set()
