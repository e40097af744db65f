"""The state of a run, found from its folder alone: does it go on, and how did it end?"""

import socket
import time
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from mtrain.core.record_files import METRICS
from mtrain.records.history import Record
from mtrain.spec.files import read_bytes
from mtrain_ui.pages.folder import Absent, RunFiles

RunState = Literal["running", "finished", "failed", "interrupted", "unfinished"]
MEANING: dict[RunState, str] = {
    "running": "goes on",
    "finished": "made all its updates",
    "failed": "ended with an error",
    "interrupted": "was asked to end, and saved its state",
    "unfinished": "shows no sign of life and has not recorded its end: it was killed, or its host is down",
}
FRESH_S = 60.0
"""A run whose records are younger goes on, even if no process of this host runs it."""
FRESH_ELSEWHERE_S = 300.0
"""The same for a run of another host, whose processes cannot be seen."""


def state_of(run: RunFiles, end: Record | None, *, now: float | None = None) -> RunState:
    """Return the state of a run. ``end``: the record with which its last attempt ended; None if there is none."""
    reason = None if end is None else end.get("reason")
    if reason == "done":
        return "finished"
    if reason == "interrupted":
        return "interrupted"
    if reason is None and _lives(run, time.time() if now is None else now):
        return "running"
    if reason == "failed" or _has_failure(run):
        return "failed"
    return "unfinished"


def _lives(run: RunFiles, now: float) -> bool:
    host = run.json("environment.json").get("host")
    # Processes of another host cannot be looked up, and its clock may differ.
    elsewhere = isinstance(host, str) and host != socket.gethostname()
    age_s = now - run.size_and_time(METRICS)[1]
    if age_s < (FRESH_ELSEWHERE_S if elsewhere else FRESH_S) and not _has_failure(run):
        return True
    return not elsewhere and _is_held(run)


def _is_held(run: RunFiles) -> bool:
    """Return whether the process that started the job exists: its number is in the lock file."""
    try:
        # The file is not locked to find out, because a job that starts at that moment would be refused.
        lock = run.file(".lock-0")
        number = int(read_bytes(lock, limit=100).strip() or b"0")
        # A process that began after the file was written has only inherited the number.
        return number > 0 and psutil.Process(number).create_time() <= lock.stat().st_mtime + 1.0
    except (Absent, OSError, ValueError, OverflowError, psutil.Error):
        return False


def _has_failure(run: RunFiles) -> bool:
    return any((run.path / "failures").glob("rank-*.json"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first error of a rank."""

    rank: Any
    host: str
    message: str
    traceback: str


def failure_of(run: RunFiles) -> Failure | None:
    """Return the earliest error that a rank of the last attempt has written; None where there is none."""
    names = sorted(path.name for path in (run.path / "failures").glob("rank-*.json"))[:64]
    contents = [content for name in names if (content := run.json(f"failures/{name}"))]
    if not contents:
        return None
    first = min(contents, key=lambda content: t if isinstance(t := content.get("time"), int | float) else 0.0)
    return Failure(
        rank=first.get("rank"),
        host=str(first.get("host", "?")),
        message=str(first.get("error") or first.get("message") or "no message")[:2000],
        traceback=str(first.get("traceback", ""))[-20000:],
    )
