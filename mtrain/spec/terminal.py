"""Print text that others have written: names of files and classes, messages of other hosts, lines of logs.

A terminal obeys control characters. A class name or a line of a log may hold some that clear the screen, set the window's
title, or make a line look like another one.
"""

import logging
import os
import re
import sys
from typing import IO

LAST_STANDARD = 2
"""The highest descriptor of the standard streams."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line feed; DEL; C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators, and marks that reverse the order of characters
    "\ud800-\udfff]"  # surrogates: bytes of a file name that are not UTF-8, which cannot be printed at all
)


def printable(text: object, *, limit: int | None = None) -> str:
    r"""Return text that is safe to print: control characters as ``\u001b``, without colours; cut after ``limit`` characters.

    Tabs and line feeds stay. JSON text stays the same value, because there they are written in the same way.
    """
    words = str(text)
    words = words if limit is None else words[:limit]
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", _COLOUR.sub("", words.replace("\r\n", "\n")))


def one_line(text: object, *, limit: int | None = None) -> str:
    r"""Return text like ``printable``, with tabs and line feeds as ``\u0009`` and ``\u000a`` too."""
    return re.sub("[\t\n]", lambda found: f"\\u{ord(found[0]):04x}", printable(text, limit=limit))


def say(text: object = "", *, stream: IO[str] | None = None, err: bool = False, nl: bool = True) -> None:
    """Print text that may hold anything; ``stream``: None, standard output, or with ``err`` standard error."""
    stream = stream or (sys.stderr if err else sys.stdout)
    print(printable(text), file=stream, end="\n" if nl else "", flush=True)


def open_closed_streams() -> None:
    """Open what the caller has closed of standard input, output and error, on nothing: no file of a job gets its number."""
    # ``open`` gives the lowest free number, so each one up to 2 that is returned was closed.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
        continue
    os.close(descriptor)
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class PrintableFormatter(logging.Formatter):
    """Formats records of the log like ``printable``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as safe text."""
        return printable(super().format(record))
