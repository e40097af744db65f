"""The thread that reads and writes for channels: one for a single channel, or one for those of all hosts of a job.

With a thread for each host, a leader of a thousand hosts had two thousand threads, which contended for the interpreter.
"""

import heapq
import itertools
import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_CHUNK_BYTES = 1 << 16


class Served(Protocol):
    """Something with file descriptors that do not block. All members are used by the thread alone."""

    incoming: int
    """The descriptor to read from."""

    @property
    def outgoing(self) -> int | None:
        """Return the descriptor to write to while there is something to write, else None."""

    @property
    def is_over(self) -> bool:
        """Return whether nothing is to be read or written any more."""

    def tick(self, now: float) -> float:
        """Do what is due at the monotonic time ``now``; return when something is due next."""

    def read(self) -> None:
        """Read what can be read."""

    def write(self) -> None:
        """Write what can be written."""

    def fail(self, error: Exception) -> None:
        """Note an error of the code itself, after which it is over."""

    def finish(self) -> None:
        """Close the descriptors. It is the last call."""


class ChannelThread:
    """A thread that runs while it has something to serve.

    Args:
        name: of the thread.
        many: whether it serves many, pipes and sockets only; else one, which may also be a file or a device.
    """

    def __init__(self, name: str, *, many: bool) -> None:
        self._name = name
        self._make_selector = selectors.DefaultSelector if many else selectors.PollSelector
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._arrived: list[Served] = []
        self._attention: set[Served] = set()
        self._wake_write = -1

    def serve(self, end: Served) -> None:
        """Read and write for ``end`` until it is over."""
        with self._lock:
            self._arrived.append(end)
            if not self.is_idle:
                self._wake()
                return
            # The thread ends with the last of what it serves, so that no thread is left where no job is.
            wake_read, self._wake_write = os.pipe()
            os.set_blocking(wake_read, False)
            os.set_blocking(self._wake_write, False)
            self._thread = threading.Thread(target=self._work, args=(wake_read,), name=self._name, daemon=True)
            self._thread.start()

    def attend(self, end: Served) -> None:
        """Have the thread tick ``end`` soon, because something about it has changed. Never blocks."""
        with self._lock:
            if not self.is_idle:
                self._attention.add(end)
                self._wake()

    def is_current(self) -> bool:
        """Return whether this code runs in the thread."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, where it serves nothing any more."""
        if self.is_idle and self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def is_idle(self) -> bool:
        """Return whether the thread serves nothing any more, and ends."""
        return self._wake_write < 0

    def _wake(self) -> None:
        with suppress(OSError):  # The pipe is full, so the thread will wake anyway.
            os.write(self._wake_write, b".")

    def _work(self, wake_read: int) -> None:
        with self._make_selector() as selector:
            selector.register(wake_read, selectors.EVENT_READ)
            _Round(selector).run(self._changes)
        os.close(wake_read)

    def _changes(self, served: int) -> "tuple[list[Served], set[Served]] | None":
        """Return what has arrived and what is to be attended to since the last call; None: the thread ends.

        ``served``: how many it still serves.
        """
        with self._lock:
            changes = self._arrived, self._attention
            self._arrived, self._attention = [], set()
            if not served and not changes[0]:
                os.close(self._wake_write)
                self._wake_write = -1
                return None
            return changes


class _Round:
    """What the thread serves, and when something is due for each."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._due: dict[Served, float] = {}
        self._writing: dict[Served, int] = {}
        """The descriptor of each that waits until it can write."""
        self._queue: list[tuple[float, int, Served]] = []
        """A heap of when something is due. An entry that differs from ``_due`` is out of date."""
        self._count = itertools.count()

    def run(self, changes: "Callable[[int], tuple[list[Served], set[Served]] | None]") -> None:
        """Serve until ``changes`` returns None."""
        while (changed := changes(len(self._due))) is not None:
            for end in changed[0]:
                self._selector.register(end.incoming, selectors.EVENT_READ, end)
                self._due[end] = 0.0
            for end in (*changed[0], *changed[1]):
                self._tick(end)
            while self._queue and self._queue[0][0] <= time.monotonic():
                due, _, end = heapq.heappop(self._queue)
                if self._due.get(end) == due:
                    self._tick(end)
            self._await()

    def _await(self) -> None:
        """Wait until something can be read or written or is due, and read and write."""
        timeout_s = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
        if not self._due:
            return
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                os.read(key.fd, _CHUNK_BYTES)
            elif key.fd == self._writing.get(key.data):
                self._do(key.data, key.data.write)
            elif events & selectors.EVENT_READ and key.data in self._due:
                self._do(key.data, key.data.read)

    def _tick(self, end: Served) -> None:
        if end not in self._due:
            return

        def tick() -> None:
            self._due[end] = end.tick(time.monotonic())
            heapq.heappush(self._queue, (self._due[end], next(self._count), end))

        self._do(end, tick)

    def _do(self, end: Served, action: Callable[[], None]) -> None:
        """Act for ``end``; then retire it if it is over, or see whether it waits to write."""
        try:
            action()
        except Exception as error:  # If this thread just died, all peers would be blamed for the silence.
            end.fail(error)
        outgoing = None if end.is_over else end.outgoing
        # A descriptor is watched for writing only while something waits, or ``select`` would return at once each time.
        if outgoing is None and end in self._writing:
            self._selector.unregister(self._writing.pop(end))
        elif outgoing is not None and end not in self._writing:
            self._selector.register(outgoing, selectors.EVENT_WRITE, end)
            self._writing[end] = outgoing
        if end.is_over:
            self._selector.unregister(end.incoming)
            del self._due[end]
            end.finish()
