"""The largest size that a process has had: of itself alone, where Linux's ``ru_maxrss`` begins with that of its parent."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest


def peak_bytes(pid: int | None = None) -> int:
    """Return the largest resident set of a process (None: this one); 0 of one that has ended."""
    return _status("VmHWM", pid)


@contextmanager
def growth() -> Iterator[SimpleNamespace]:
    """Give an object whose ``bytes`` says afterwards how far this process has grown meanwhile, at most."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except OSError as error:
        pytest.skip(f"the peak of this process cannot be set back: {error}")
    before, grown = _status("VmRSS", None), SimpleNamespace(bytes=0)
    yield grown
    grown.bytes = peak_bytes() - before


def _status(name: str, pid: int | None) -> int:
    try:
        text = Path(f"/proc/{pid or 'self'}/status").read_text(errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:")), 0)
