"""Parts of messages between a leader and an agent that both read and write: the farewell, warnings, and files."""

import base64
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mtrain.errors import UsageError

Message = dict[str, Any]
WARNINGS = "warnings"
"""Name of the field of an answer."""
MAX_WARNINGS = 20
"""Most warnings that one answer carries."""
LEAST_BYTES = 2048
"""Smaller files are sent as they are, which people can read in a message."""
PACKED = "zlib"
NOTHING = "ended before anything was started"
"""Message for a request to end that came before anything was started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Farewell:
    """How a job ended, for the process that serves it on another host."""

    code: int
    """Exit code of the job."""
    text: str = ""
    """What that process prints before it exits."""
    reason: str = ""
    """Why the job failed, in one line; empty: it did not, or this is not known."""
    refusal: str | None = None
    """Why this host was refused or nothing was started, without the ``error:`` that ``text`` begins with; None:
    neither."""
    discard: bool = False
    """Whether the host deletes its run folder."""

    @classmethod
    def for_refusal(cls, reason: str) -> "Farewell":
        """Return the farewell to a host that is refused, or whose job was not started."""
        return cls.for_error(reason, code=UsageError.exit_code)

    @classmethod
    def for_error(cls, reason: str, *, code: int) -> "Farewell":
        """Return the farewell after an error of the leader.

        It is a refusal where ``code`` is that of a ``UsageError``.
        """
        refusal = reason if code == UsageError.exit_code else None
        return cls(code=code, text=f"error: {reason}", reason=next(iter(reason.splitlines()), ""), refusal=refusal)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Farewell":
        """Read a farewell from a ``bye`` message; every field may be missing."""
        refusal = message.get("refusal")
        return cls(
            code=int(message.get("code", 0)),
            text=str(message.get("text", "")),
            reason=str(message.get("reason", "")),
            refusal=None if refusal is None else str(refusal),
            discard=bool(message.get("discard")),
        )

    def message(self) -> dict[str, Any]:
        """Return the ``bye`` message.

        ``text`` is in it also for a refusal: hosts with another version of mtrain print it.
        """
        refusal = {} if self.refusal is None else {"refusal": self.refusal}
        fields = {"code": self.code, "text": self.text, "reason": self.reason, "discard": self.discard}
        return {"do": "bye", **fields, **refusal}


# What an agent writes to its own standard error is seen by nobody where the leader has started it, so the warnings that it
# logs while it answers a request go with the answer, and the leader shows them.
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
def collect_warnings() -> Iterator[list[str]]:
    """Return a context that collects the warnings which mtrain logs inside it."""
    logger, collector = logging.getLogger("mtrain"), _Collector()
    logger.addHandler(collector)
    try:
        yield collector.texts
    finally:
        logger.removeHandler(collector)


def show_warnings(answers: Sequence[tuple[str, Message]], note: Callable[[str], None]) -> None:
    """Show the warnings of answers, each with the label of its host; hosts that share a folder say the same but once."""
    shown: set[str] = set()
    for label, answer in answers:
        for text in answer.get(WARNINGS, ()):
            if str(text) not in shown:
                shown.add(str(text))
                note(f"warning: {label}: {text}")


def pack_files(files: Mapping[str, str]) -> dict[str, Any]:
    """Return files by name as values of a message, compressed where that makes them smaller."""
    # The spec of a job names all of its hosts, so what all hosts together receive grows with the square of their number.
    # Compressed, a host takes about three bytes of it.
    contents = {name: (text, text.encode("utf-8", "surrogateescape")) for name, text in files.items()}
    return {
        name: text
        if len(content) < LEAST_BYTES
        else {PACKED: base64.b64encode(zlib.compress(content, 9)).decode("ascii")}
        for name, (text, content) in contents.items()
    }


def unpack_files(files: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the files that ``pack_files`` has packed."""
    return {
        name: value
        if isinstance(value, str)
        else zlib.decompress(base64.b64decode(value[PACKED])).decode("utf-8", "surrogateescape")
        for name, value in files.items()
    }
