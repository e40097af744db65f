"""Failures of ranks: files of a run folder that a failing rank writes and the process that started it reads."""

import itertools
import os
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain.core.record_files import write_json
from mtrain.errors import MtrainError
from mtrain.spec import outputs
from mtrain.spec.files import parse_json, read_bytes
from mtrain.system.runfolder import RunFolder

MAX_FAILURE_BYTES = 64 << 20
"""Largest failure file (``failures/rank-N.json``) that is read, in bytes."""
MAX_EARLIER = 10
"""How many failures of a rank in earlier attempts are kept: an elastic job may have any number of attempts."""


def write_failure(
    run: RunFolder, rank: int, error: BaseException, *, attempt: str = "", now: float | None = None
) -> Path:
    """Write the error of a failing rank into the run folder, where the process that started it looks for it.

    ``attempt`` is the mark of the attempt to which the rank belongs (``attempts.Mark``); failures of others are ignored.
    """
    outputs.make_folder(run.failures)
    path = run.failures / f"rank-{rank}.json"
    content = {
        "rank": rank,
        "attempt": attempt,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time() if now is None else now,
        "error": f"{type(error).__name__}: {error}",
        "message": str(error),
        "exit_code": error.exit_code if isinstance(error, MtrainError) else 1,
        "expected": isinstance(error, MtrainError),
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_json(path, content)
    return path


def set_aside_failures(run: RunFolder, *, ranks: range | None = None) -> None:
    """Rename earlier failure files of ``ranks`` (None: all), so that they do not count as failures of a new attempt.

    The newest one of a rank becomes ``earlier-1-rank-N.json``, the one before it ``earlier-2-rank-N.json``; the oldest goes.
    """
    for path in _failure_files(run, ranks):
        names = [path, *(path.with_name(f"earlier-{number}-{path.name}") for number in range(1, MAX_EARLIER + 1))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            with suppress(FileNotFoundError):
                newer.replace(older)


def read_failures(run: RunFolder, *, ranks: range | None = None, attempt: str | None = None) -> list[dict[str, Any]]:
    """Return the failures that ``ranks`` (None: all) have written, the earliest first, without unreadable files.

    ``attempt``: only those of that attempt.
    """
    # A rank of an earlier attempt may still run, on this host or on another one that shares the folder, and write after this
    # attempt has begun.
    failures = []
    for path in _failure_files(run, ranks):
        try:
            content = parse_json(read_bytes(path, limit=MAX_FAILURE_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and attempt in (None, content.get("attempt")):
            failures.append(content)
    return sorted(failures, key=lambda failure: (failure.get("time", 0.0), failure.get("rank", 0)))


def _failure_files(run: RunFolder, ranks: range | None) -> list[Path]:
    if ranks is None:
        return list(run.failures.glob("rank-*.json"))
    return [path for path in (run.failures / f"rank-{rank}.json" for rank in ranks) if path.exists()]
