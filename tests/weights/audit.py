"""Record the import, execution, file, process and network accesses that Python itself reports while code runs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_HARMLESS = ("gc.", "object.__", "sys._getframe", "builtins.id")
_recording: list[str] | None = None


def _hook(event: str, arguments: object) -> None:
    if _recording is not None and not event.startswith(_HARMLESS):
        _recording.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_hook)


@contextmanager
def audited() -> Iterator[list[str]]:
    """The list fills with the events of this process."""
    global _recording
    _recording = events = []
    try:
        yield events
    finally:
        _recording = None
