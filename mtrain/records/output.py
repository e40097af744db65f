"""Bytes for people, written by a thread: a reader that stands still, such as a pager, holds up nothing of the job."""

import os
import threading
from collections import deque
from contextlib import suppress
from typing import IO

from mtrain.system.log_limit import left_out

MOST_WAITING_BYTES = 16 << 20
"""Most that waits for a reader that is slower than the ranks; of more, the oldest is left out."""


class Writer:
    """Writes to streams what it is given, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[IO[str], bytes]] = deque()
        self._waiting_bytes = self._left_out = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._broken: set[IO[str]] = set()
        """Streams that nobody reads any more."""
        self._thread = threading.Thread(target=self._write_all, name="output of ranks", daemon=True)
        self._thread.start()

    def put(self, stream: IO[str], data: bytes) -> None:
        """Have ``data`` written to a stream."""
        with self._changed:
            self._waiting.append((stream, data))
            self._waiting_bytes += len(data)
            while self._waiting_bytes > MOST_WAITING_BYTES:
                gone = len(self._waiting.popleft()[1])
                self._waiting_bytes -= gone
                self._left_out += gone
            self._changed.notify()

    def close(self) -> None:
        """Wait until all is written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                stream, data = self._waiting.popleft()
                self._waiting_bytes -= len(data)
                gone, self._left_out = self._left_out, 0
            if gone:
                data = left_out(gone, where="the logs") + data
            if stream not in self._broken:
                try:
                    _write(stream, data)
                except (OSError, ValueError):  # its reader has gone; the job goes on, and the logs have all
                    self._broken.add(stream)


def _write(stream: IO[str], data: bytes) -> None:
    """Write bytes to a stream, by its descriptor where it has one: no lock is held while a reader stands still."""
    descriptor = None
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()
        descriptor = stream.fileno()
    if descriptor is None:
        stream.write(data.decode(errors="replace"))
        stream.flush()
        return
    while data:
        data = data[os.write(descriptor, data) :]
