"""Rank 0's side of copying: hand each new checkpoint to the copying process, and learn how it went.

No method waits for the network, a disk or the other process; ``settled`` tells at the end of a job whether to wait.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtrain.backup.run_copies import folder_at
from mtrain.backup.worker import Settings
from mtrain.spec.model import CheckpointSpec

log = logging.getLogger(__name__)
READ_BYTES = 1 << 16
ENDING_S = 5.0
"""Seconds that the killed process may take to be gone."""
EXTRA_S = 5.0
"""Seconds after ``copy_timeout_s`` within which the copying process must have told that it gives up."""


@dataclass(frozen=True, slots=True)
class News:
    """A record about a copy, for the report."""

    kind: str
    """"copy" or "warning"."""
    fields: dict[str, Any]


class Copies(Protocol):
    """What a rank knows of copies."""

    def start(self) -> None:
        """Start the copying process, which needs some seconds to load its libraries."""
        ...

    def written(self, checkpoint: Path) -> None:
        """Learn that a checkpoint is complete. Another thread may call."""
        ...

    def news(self) -> list[News]:
        """Return what happened since the last call. It returns at once."""
        ...

    def settled(self) -> bool:
        """Return whether no copy is being made or waits to be made."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return the part of a job's summary that is about copies."""
        ...

    def close(self) -> None:
        """End the copying process; a copy that is not complete stays torn."""
        ...


class NoCopies:
    """``Copies`` of a rank that copies nothing."""

    def start(self) -> None:
        """Do nothing."""

    def written(self, checkpoint: Path) -> None:
        """Do nothing."""

    def news(self) -> list[News]:
        """Return nothing."""
        return []

    def settled(self) -> bool:
        """Return True."""
        return True

    def summary(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Copier:
    """Has the checkpoints of one run copied by another process, the newest first; see ``Copies``."""

    def __init__(self, rule: CheckpointSpec, run_dir: Path) -> None:
        assert rule.copy_to is not None
        place = folder_at(rule.copy_to, run_dir)
        self._shown = place.shown
        self._settings = Settings(
            address=place.address,
            run_dir=str(run_dir.absolute()),
            newest=rule.copies_kept,
            best=rule.keep_best,
            check=rule.copy_check,
            timeout_s=rule.copy_timeout_s,
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._asked: Path | None = None
        """The newest checkpoint that was handed over and not answered for."""
        self._since = 0.0
        self._again = False
        """Whether the process was started again for ``_asked``."""
        self._unread: list[dict[str, Any]] = []
        self._copied = self._failed = 0
        self._newest: str | None = None
        self._error: str | None = None

    def start(self) -> None:
        """See ``Copies.start``."""
        with self._lock, contextlib.suppress(OSError):  # ``written`` tries again
            self._start()

    def written(self, checkpoint: Path) -> None:
        """See ``Copies.written``."""
        with self._lock:
            self._asked, self._again = checkpoint.absolute(), False
            self._hand_over()

    def news(self) -> list[News]:
        """See ``Copies.news``."""
        with self._lock:
            answers, self._unread = [*self._unread, *self._answers()], []
            heard = [self._heard(answer) for answer in answers]
            if self._asked is not None and self._is_lost():
                # It may have given up an older checkpoint, and this one waited.
                if self._again:
                    reason = "the process that copies has ended, or does not answer"
                    heard.append(self._heard({"name": self._asked.name, "error": reason}))
                    self._stop()
                else:
                    self._again = True
                    self._hand_over()
            return [news for news in heard if news is not None]

    def settled(self) -> bool:
        """See ``Copies.settled``."""
        with self._lock:
            return self._asked is None

    def summary(self) -> dict[str, Any]:
        """See ``Copies.summary``."""
        copies = {"to": self._shown, "copied": self._copied, "failed": self._failed, "newest": self._newest}
        return {"copies": {**copies, "error": self._error}}

    def close(self) -> None:
        """See ``Copies.close``."""
        with self._lock:
            self._stop()

    def _hand_over(self) -> None:
        """Name the newest checkpoint to the process, which is started where it does not run."""
        line = json.dumps({"checkpoint": str(self._asked)}).encode() + b"\n"
        self._since = time.monotonic()
        try:
            if self._process is not None and self._is_lost():
                self._unread += self._answers()  # before the pipe is closed
                self._stop()
            if self._process is None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(line)
        except OSError as error:  # ``news`` tries again, and then tells.
            log.warning("checkpoint.copy_to: the process that copies: %s", error)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mtrain.backup.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        assert self._process.stdin is not None
        self._process.stdin.write(self._settings.line())

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # A process that waits for a dead disk cannot be ended.
            self._process.wait(ENDING_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process, self._rest = None, b""

    def _answers(self) -> list[dict[str, Any]]:
        """Return what the process has told since the last call."""
        if self._process is None or self._process.stdout is None:
            return []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._process.stdout.fileno(), READ_BYTES):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def _is_lost(self) -> bool:
        """Return whether the process has ended, or is silent for longer than two copies may take.

        Two may be due: the one that was under way, and the newest.
        """
        silent = time.monotonic() - self._since > 2 * self._settings.timeout_s + EXTRA_S
        return self._process is None or self._process.poll() is not None or silent

    def _heard(self, answer: dict[str, Any]) -> News | None:
        if self._asked is not None and answer["name"] == self._asked.name:
            self._asked = None
        if answer.get("passed_over"):
            return None
        if "error" not in answer:
            self._copied, self._newest, self._error = self._copied + 1, answer["name"], None
            return News("copy", {**answer, "to": self._shown})
        self._failed, self._error = self._failed + 1, f"{answer['name']}: {answer['error']}"
        intact = f"the newest copy is {self._newest}" if self._newest else "this job has made no copy so far"
        message = f"{answer['name']} was not copied to {self._shown}: {answer['error']}; the job goes on, {intact}"
        return News("warning", {"message": message, "copy": answer})
