"""The base of displays: reporters in the process that started the job."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from mtrain.core.interfaces.reporter import Record, Reporter, tell
from mtrain.records.reporter import word_error
from mtrain.spec import terminal

P = ParamSpec("P")
D = TypeVar("D", bound="Display")
MOST_OPEN_BYTES = 1 << 20
"""Longest line that is waited for."""


def guard(method: "Callable[Concatenate[D, P], None]") -> "Callable[Concatenate[D, P], None]":
    """Make a method of a display switch the display off where it raises, with one line: the job goes on without its terminal."""

    @functools.wraps(method)
    def call(self: D, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._is_off and method.__name__ != "close":
            return
        try:
            method(self, *args, **kwargs)
        except (Exception, SystemExit) as error:  # rich ends the program where nobody reads its output
            self._is_off = True
            with contextlib.suppress(OSError):
                terminal.say(f"the progress display has failed: {word_error(error)}; the job goes on", err=True)

    return call


class Lines:
    """The lines of what several ranks print in pieces."""

    def __init__(self) -> None:
        self._open: dict[int | None, bytes] = {}

    def add(self, data: bytes, *, rank: int | None) -> list[bytes]:
        """Return the lines that are complete now, each after the number of its rank, without what it has overwritten itself."""
        *lines, rest = (self._open.get(rank, b"") + data).split(b"\n")
        if len(rest) > MOST_OPEN_BYTES:
            lines, rest = [*lines, rest], b""
        self._open[rank] = rest
        label = b"" if rank is None else b"[%d] " % rank
        return [label + line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]


class Display(Reporter):
    """A reporter that shows the progress of a job to a person.

    It is in the process that started the job, and is fed with the lines of ``metrics.jsonl``.
    """

    # Not in a rank: ranks write to their logs, may be on other hosts, and are several attempts where a job is started again.
    shares_records = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Guard every method by which a job reaches the display."""
        super().__init_subclass__(**kwargs)
        for name in {"record", "output", "note", "tick", "show_end", "close"} & vars(cls).keys():
            setattr(cls, name, guard(vars(cls)[name]))

    def __init__(self) -> None:
        self._is_off = False
        self._rank_lines = Lines()

    @guard
    def record(self, record: Record) -> None:
        """Pass a record to the method for its kind. A display that raises an exception is switched off with one line."""
        tell(self, record)

    def note(self, text: str) -> None:
        """Show a sentence from the process that started the job."""

    @guard
    def output(self, data: bytes, *, rank: int | None) -> None:
        """Show what a rank has printed, line by line; ``rank``: None, without its number."""
        for line in self._rank_lines.add(data, rank=rank):
            self.show_line(line.decode(errors="replace"))

    def show_line(self, line: str) -> None:
        """Show a line that a rank has printed."""

    def show_end(self, code: int, *, logs: Path) -> None:
        """Show that the job has ended, with this exit code; ``logs``: the folder of its logs."""

    def tick(self) -> None:
        """Redraw, if the display changes with time. It is called several times a second."""

    def close(self) -> None:
        """Restore the terminal. It may be called twice."""
