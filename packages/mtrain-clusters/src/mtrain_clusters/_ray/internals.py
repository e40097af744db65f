"""Private parts of Ray: what it has no option for."""

from contextlib import suppress
from typing import Any

TESTED = ("2.60.0",)
"""Versions of Ray with which these internals were tested."""


def silence(ray: Any) -> None:
    """Keep Ray from printing its own reports about dead nodes, dozens of lines of their logs, into the job's output.

    The option ``log_to_driver`` does not cover them. With a version of Ray that has no such function they are printed.
    """
    with suppress(AttributeError):
        if callable(ray._private.worker.print_to_stdstream):
            ray._private.worker.print_to_stdstream = lambda *report, **options: None
