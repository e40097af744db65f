"""Displays of a job's progress on the console, and the choice among all displays."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from mtrain.core.interfaces.reporter import Record
from mtrain.records.display import Display
from mtrain.records.wording import duration, evaluation_line, event_line, start_facts, update_line
from mtrain.spec import terminal
from mtrain.system.log_limit import left_out

Mode = Literal["auto", "rich", "plain", "quiet", "verbose", "output"]


def make_display(mode: Mode, *, title: str, stream: IO[str] | None = None) -> Display:
    """Return the display for ``mode``; auto: rich on a terminal, one live output in a notebook, plain lines elsewhere.

    output: what the ranks print, as it is.
    """
    if mode == "output":
        return Output(stream or sys.stdout, notes=stream or sys.stderr, title=title)
    stream = stream or sys.stdout
    if mode == "quiet":
        return Quiet(stream)
    if mode == "verbose":
        return Verbose(stream, title=title)
    if mode == "auto" and is_of_a_cell(stream):
        from mtrain.records.notebook import Notebook

        return Notebook(title=title)
    if mode == "plain" or (mode == "auto" and not stream.isatty()):
        return Plain(stream, title=title)
    from mtrain.records.rich import Rich

    return Rich(stream, title=title, force=mode == "rich")


def is_of_a_cell(stream: IO[str]) -> bool:
    """Return whether text written to ``stream`` appears below the running cell of a notebook."""
    # The stream's class tells it without an import. A kernel's stream that a cell has replaced, as `%%capture` does, is none.
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class Quiet(Display):
    """A display that prints only warnings and notes."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream

    def message(self, record: Record) -> None:
        """Print the record if it is a warning."""
        if record.get("kind") == "warning":
            self.note(event_line(record))

    def note(self, text: str) -> None:
        """Print the text as a line of its own."""
        terminal.say(text, stream=self._stream)


class Notes(Quiet):
    """A display of notes and warnings. On a terminal each note takes the place of the one before it."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self._is_open = False

    def message(self, record: Record) -> None:
        """Print the record; a warning is a line of its own."""
        if record.get("kind") != "note" or not self._stream.isatty():
            self.note(event_line(record))
            return
        self._is_open = True
        print(f"\r\x1b[K{terminal.one_line(event_line(record))}", end="", file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Print the text as a line of its own."""
        self.close()
        super().note(text)

    def close(self) -> None:
        """End the line of a note."""
        if self._is_open:
            self._is_open = False
            print(file=self._stream, flush=True)


class Plain(Display):
    """A display for logs and pipes, one line a record.

    It prints an update at most every ``every_s`` seconds, and always the last one, evaluations, notes, warnings, requested
    checkpoints, the start and the end.
    """

    def __init__(
        self, stream: IO[str], *, title: str, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._last = -float("inf")
        self.note(title)

    def update(self, record: Record) -> None:
        """Print a line, unless the last one was a short time ago."""
        last = record.get("update", 0) + 1 == record.get("total_updates")
        if last or self._clock() - self._last >= self._every_s:
            self._last = self._clock()
            self.note(update_line(record))

    def evaluation(self, record: Record) -> None:
        """Print the metrics in one line."""
        self.note(evaluation_line(record))

    def start(self, record: Record) -> None:
        """Print the record in one line, if there is something to say."""
        if line := event_line(record):
            self.note(line)

    checkpoint = message = end = failure = start

    def show_line(self, line: str) -> None:
        """Print it."""
        self.note(line)

    def note(self, text: str) -> None:
        """Print it."""
        terminal.say(text, stream=self._stream)


class Output(Plain):
    """The display of a script that does not import mtrain: one stream gets what its ranks print, another one mtrain's sentences."""

    def __init__(
        self, stream: IO[str], *, notes: IO[str], title: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notes = notes
        self._began = clock()
        self._writer = Writer()
        self._is_in_line = False
        super().__init__(stream, title=title, clock=clock)

    def output(self, data: bytes, *, rank: int | None) -> None:
        """Show what a rank has printed: byte by byte, or by lines with its number."""
        if rank is not None:
            data = b"".join(line + b"\n" for line in self._rank_lines.add(data, rank=rank))
        if data:
            self._writer.put(self._stream, data)
            self._is_in_line = not data.endswith(b"\n")

    def note(self, text: str) -> None:
        """Show a sentence of mtrain's as a line of its own."""
        line = f"{terminal.printable(text)}\n".encode(errors="replace")
        self._writer.put(self._notes, b"\n" * self._is_in_line + line)
        self._is_in_line = False

    def show_end(self, code: int, *, logs: Path) -> None:
        """Say how long the job took, how it ended, and where all is that its ranks have printed."""
        self.note(f"ended after {duration(self._clock() - self._began)} with exit code {code}; logs: {logs}")

    def close(self) -> None:
        """Wait until all is written."""
        self._writer.close()


class Verbose(Plain):
    """A display of plain lines that leaves nothing out: every update, and every fact about the start."""

    def __init__(self, stream: IO[str], *, title: str) -> None:
        super().__init__(stream, title=title, every_s=0)

    def start(self, record: Record) -> None:
        """Print the sentence about the start, and then the record's values under their names."""
        super().start(record)
        if facts := start_facts(record):
            self.note(facts)


MOST_WAITING_BYTES = 16 << 20
"""Most that waits for a reader that is slower than the ranks; of more, the oldest is left out."""


class Writer:
    """Writes to streams what it is given, in order."""

    def __init__(self) -> None:
        # In a thread: a reader that stands still, such as a pager, must not stop the process that watches the ranks.
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
