"""One display for a whole job, fed with the records of its ``metrics.jsonl`` by the process that started it."""

import sys
import time
from collections.abc import Callable
from typing import IO, Literal, Protocol

from mtrain.report.history import Record
from mtrain.report.wording import evaluation_line, event_line, update_line

Mode = Literal["auto", "rich", "plain", "quiet"]


class Display(Protocol):
    """What ``launch.run`` tells a person through."""

    def record(self, record: Record) -> None:
        """One line of ``metrics.jsonl``."""
        ...

    def note(self, text: str) -> None:
        """A sentence from the starter itself."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was. Can be called twice."""
        ...


def make_display(mode: Mode, *, title: str, stream: IO[str] | None = None) -> Display:
    """The display for ``mode``; auto: rich on a terminal, plain lines elsewhere."""
    stream = stream or sys.stdout
    if mode == "quiet":
        return Quiet(stream)
    if mode == "plain" or (mode == "auto" and not stream.isatty()):
        return Plain(stream, title=title)
    from mtrain.report.rich import Rich

    return Rich(stream, title=title, force=mode == "rich")


class Quiet:
    """Warnings only."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def record(self, record: Record) -> None:
        """Print a warning; pass over the rest."""
        if record.get("kind") == "warning":
            self.note(f"warning: {record.get('message', '')}")

    def note(self, text: str) -> None:
        """Print it."""
        print(text, file=self._stream, flush=True)

    def tick(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Plain:
    """A line every ``every_s`` seconds and at each evaluation: for logs and pipes."""

    def __init__(
        self, stream: IO[str], *, title: str, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._last = -float("inf")
        self.note(title)

    def record(self, record: Record) -> None:
        """Print what the record says, updates not more often than every ``every_s`` seconds."""
        kind = record.get("kind")
        if kind == "update":
            last = record.get("update", 0) + 1 == record.get("total_updates")
            if last or self._clock() - self._last >= self._every_s:
                self._last = self._clock()
                self.note(update_line(record))
        elif kind == "evaluation":
            self.note(evaluation_line(record))
        elif kind in ("start", "note", "warning", "end"):
            line = event_line(record)
            if line:
                self.note(line)

    def note(self, text: str) -> None:
        """Print it."""
        print(text, file=self._stream, flush=True)

    def tick(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
