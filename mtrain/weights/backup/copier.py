"""Rank 0's side of copying: hand each new checkpoint to the copying process, and learn how it went.

No method waits for the network, a disk or the other process; ``settled`` tells at the end of a job whether to wait.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.overriding import override
from mtrain.spec.model import CheckpointSpec
from mtrain.weights.backup.run_copies import folder_at
from mtrain.weights.backup.worker import CopySettings

log = logging.getLogger(__name__)
READ_BYTES = 1 << 16
ENDING_S = 5.0
"""Seconds that the killed process may take to be gone."""
EXTRA_S = 5.0
"""Seconds after ``copy_timeout_s`` within which the copying process must have told that it gives up."""
MANY_PASSED_OVER = 10
"""Checkpoints that are passed over in a row before a warning says so."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that waits to be copied, or is copied."""

    name: str
    """Name of the checkpoint, for example ``step-00001200``."""
    path: Path
    """The folder to copy from: links to the files, or the checkpoint's own folder where links cannot be made."""

    @classmethod
    def of(cls, checkpoint: Path) -> "Kept":
        """Keep the files of a checkpoint."""
        # The name is that of a writer's folder: where a job is killed, the
        # next start deletes the links as those of a writer that has died.
        holder = f"{socket.gethostname()}@{os.getpid()}"
        folder = checkpoint.with_name(f"{store.TEMPORARY}{checkpoint.name}@{holder}.copy")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for file in checkpoint.iterdir():
                # Hard links take no room while the checkpoint exists, and keep its files when it is rotated away.
                os.link(file, folder / file.name, follow_symlinks=False)
        except OSError:  # a file system without hard links: the copy has to be quicker than the rotation
            shutil.rmtree(folder, ignore_errors=True)
            return cls(checkpoint.name, checkpoint)
        return cls(checkpoint.name, folder)

    def release(self) -> None:
        """Delete the links."""
        if self.path.name != self.name:
            shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class News:
    """A record about a copy, for the report."""

    kind: str
    """"copy" or "warning"."""
    fields: dict[str, Any]


class Copies:
    """What a rank knows of copies. This one is of a rank that copies nothing."""

    def start(self) -> None:
        """Start the copying process, which needs some seconds to load its libraries."""

    def add(self, checkpoint: Path) -> None:
        """Learn that a checkpoint is complete. Another thread may call."""

    def news(self) -> list[News]:
        """Return what happened since the last call. It returns at once."""
        return []

    def is_settled(self) -> bool:
        """Return whether no copy is being made or waits to be made."""
        return True

    def summary(self) -> dict[str, Any]:
        """Return the part of a job's summary that is about copies."""
        return {}

    def close(self) -> None:
        """End the copying process; a copy that is not complete stays torn."""


class Copier(Copies):
    """Has the checkpoints of one run copied by another process; see ``Copies``."""

    def __init__(self, rule: CheckpointSpec, run_dir: Path) -> None:
        assert rule.copy_to is not None
        place = folder_at(rule.copy_to, run_dir)
        self._shown = place.in_words
        self._settings = CopySettings(
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
        self._under_way: Kept | None = None
        """The checkpoint that was handed over and not answered for."""
        self._waiting: Kept | None = None
        """The newest checkpoint that was written since."""
        self._began = self._since = 0.0
        """When it was handed over first, and when the process was last heard of, by the clock that never goes back."""
        self._again = False
        """Whether another process was started for ``_under_way``."""
        self._passed_over = 0
        """Checkpoints that were passed over since a copy was made last."""
        self._warned = False
        self._releases: list[threading.Thread] = []
        self._unread: list[dict[str, Any]] = []
        self._copy_files = self._failed = 0
        self._newest: str | None = None
        self._error: str | None = None

    @override
    def start(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # ``add`` tries again
            self._start()

    @override
    def add(self, checkpoint: Path) -> None:
        kept = Kept.of(checkpoint.absolute())
        with self._lock:
            # A copy that is under way is made to its end. Meanwhile the newest checkpoint waits, and older ones are
            # passed over: a queue would grow without end where checkpoints are written faster than they are copied.
            if self._waiting is not None:
                self._release(self._waiting)
                self._passed_over += 1
            self._waiting = kept
            if self._under_way is None:
                self._take_next()

    @override
    def news(self) -> list[News]:
        with self._lock:
            answers, self._unread = [*self._unread, *self._answers()], []
            heard = [self._heard(answer) for answer in answers]
            if self._under_way is not None and self._is_lost():
                heard += self._recover(self._under_way)
            heard.append(self._warning())
            return [news for news in heard if news is not None]

    @override
    def is_settled(self) -> bool:
        with self._lock:
            return self._under_way is None and self._waiting is None

    @override
    def summary(self) -> dict[str, Any]:
        copies = {"to": self._shown, "copied": self._copy_files, "failed": self._failed, "newest": self._newest}
        return {"copies": {**copies, "error": self._error}}

    @override
    def close(self) -> None:
        with self._lock:
            self._stop()
            for kept in (self._under_way, self._waiting):
                if kept is not None:
                    self._release(kept)
            self._under_way = self._waiting = None
        for thread in self._releases:
            thread.join()

    def _recover(self, lost: Kept) -> list[News | None]:
        """Hand the checkpoint over to another process, or give it up where that was done before."""
        # The process may have answered, and died only then.
        late = self._answers()  # before the pipe is closed
        self._stop()
        heard = [self._heard(answer) for answer in late]
        if self._under_way is lost and self._again:
            reason = "the process that copies has ended, or does not answer"
            heard.append(self._heard({"name": lost.name, "error": reason}))
        elif self._under_way is lost:
            self._again = True
            self._hand_over()
        return heard

    def _take_next(self) -> None:
        """Hand over the checkpoint that waits, if one does."""
        self._under_way, self._waiting, self._again = self._waiting, None, False
        if self._under_way is not None:
            self._began = time.monotonic()
            self._hand_over()

    def _hand_over(self) -> None:
        """Name the checkpoint to the process, which is started where it does not run."""
        assert self._under_way is not None
        line = json.dumps({"name": self._under_way.name, "from": str(self._under_way.path)}).encode() + b"\n"
        self._since = time.monotonic()
        try:
            if self._process is not None and self._process.poll() is not None:
                self._unread += self._answers()  # before the pipe is closed
                self._stop()
            if self._process is None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(line)
        except OSError as error:  # ``news`` tries again, and then tells.
            log.warning("checkpoint.copy_to: the process that copies: %s", error)

    def _release(self, kept: Kept) -> None:
        """Delete the links to a checkpoint, without waiting for the disk: they may be the last ones of gigabytes."""
        self._releases = [thread for thread in self._releases if thread.is_alive()]
        thread = threading.Thread(target=kept.release, name="copy-release", daemon=True)
        thread.start()
        self._releases.append(thread)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mtrain.weights.backup.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdout is not None
        # ``news`` is called between updates, which must not wait for the other process.
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
        """Return whether the process has ended, or was silent for so long that it must have given up or hang itself."""
        silent = time.monotonic() - self._since > 2 * self._settings.timeout_s + EXTRA_S
        return self._process is None or self._process.poll() is not None or silent

    def _heard(self, answer: dict[str, Any]) -> News | None:
        """Take an answer of the process; return what is to be reported of it."""
        self._since = time.monotonic()
        if self._under_way is None or answer.get("name") != self._under_way.name:
            return None
        self._release(self._under_way)
        if answer.pop("ends", False):
            self._stop()
        self._passed_over = self._passed_over + 1 if answer.get("passed_over") else 0
        self._take_next()
        if answer.get("passed_over"):
            return None
        if "error" not in answer:
            self._copy_files, self._newest, self._error = self._copy_files + 1, answer["name"], None
            return News("copy", {**answer, "to": self._shown})
        self._failed, self._error = self._failed + 1, f"{answer['name']}: {answer['error']}"
        intact = f"the newest copy is {self._newest}" if self._newest else "this job has made no copy so far"
        message = f"{answer['name']} was not copied to {self._shown}: {answer['error']}; the job goes on, {intact}"
        return News("warning", {"message": message, "copy": answer})

    def _warning(self) -> News | None:
        """Warn, once, where checkpoints are written so much faster than they are copied that a copy is long out of date."""
        if self._warned or self._passed_over < MANY_PASSED_OVER:
            return None
        self._warned = True
        kept, seconds = self._under_way, time.monotonic() - self._began
        now = f"; that of {kept.name} takes {seconds:.0f} s so far" if kept is not None else ""
        message = (
            f"{self._passed_over} checkpoints in a row were not copied to {self._shown}, because copies take longer than "
            f"the time between checkpoints{now}. The newest one is copied next. For newer copies write checkpoints less often "
            "(checkpoint.every_updates, checkpoint.every_epochs), or compare sizes alone (checkpoint.copy_check: size)"
        )
        return News("warning", {"message": message})
