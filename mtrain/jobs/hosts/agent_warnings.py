"""Warnings that an agent logs while it answers a request: they go with the answer, and the leader shows them.

What an agent writes to its own standard error is seen by nobody where the leader has started it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mtrain.jobs.hosts.channel import Message

FIELD = "warnings"
"""Name of the field of an answer."""
MAX_WARNINGS = 20
"""Most warnings that one answer carries."""


class _Collector(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self.texts and len(self.texts) < MAX_WARNINGS:
            self.texts.append(text)


@contextmanager
def collect() -> Iterator[list[str]]:
    """Return a context that collects the warnings which mtrain logs inside it."""
    logger, collector = logging.getLogger("mtrain"), _Collector()
    logger.addHandler(collector)
    try:
        yield collector.texts
    finally:
        logger.removeHandler(collector)


def show(answers: Sequence[tuple[str, Message]], note: Callable[[str], None]) -> None:
    """Show the warnings of answers, each with the label of its host; hosts that share a folder say the same but once."""
    shown: set[str] = set()
    for label, answer in answers:
        for text in answer.get(FIELD, ()):
            if str(text) not in shown:
                shown.add(str(text))
                note(f"warning: {label}: {text}")
