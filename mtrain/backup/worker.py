"""The process that copies checkpoints: ``python -m mtrain.backup.worker``, started by rank 0 of a job.

It is a process of its own, so that it takes nothing from the training but processor time, at the lowest priority, and
so that a library that hangs or crashes harms nobody. Lines of JSON are its interface. On standard input: first
``Settings``, then ``{"checkpoint": PATH}`` for each one; the newest one waits while another is copied, older ones are
dropped. On standard output, for each one that was not dropped: ``{"name", "update", "seconds", "bytes"}``, with
``error`` if it failed, or ``passed_over`` if it is no longer there. When standard input ends, the process ends at once.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mtrain.backup import form
from mtrain.backup.form import BadCopy
from mtrain.backup.place import Place, PlaceError, reason_of
from mtrain.backup.run_copies import Rule, RunCopies
from mtrain.errors import MtrainError
from mtrain.system import runfolder

TRIES = 3
"""How often a copy is tried, unless the reason of a failure is lasting or a newer checkpoint waits."""
PAUSE_S = 1.0
"""Seconds before the second try; each further pause is twice as long."""
NICENESS = 10
ANSWERS = 3
"""Descriptor of what was standard output; what libraries print goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the process needs to know."""

    address: str
    """Where the copies of the run are."""
    run_dir: str
    newest: int
    best: int
    check: str
    timeout_s: float

    def line(self) -> bytes:
        """Return the first line of standard input."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass
class _Waiting:
    """The newest checkpoint that was asked for."""

    path: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, path: str) -> None:
        with self.changed:
            self.path = path
            self.changed.notify()

    def take(self) -> str:
        with self.changed:
            while self.path is None:
                self.changed.wait()
            path, self.path = self.path, None
            return path


class Copying:
    """Copies one checkpoint after the other, and tells how each went."""

    def __init__(self, settings: Settings, waiting: _Waiting) -> None:
        self._settings = settings
        self._waiting = waiting
        self._run_dir = Path(settings.run_dir)
        self._rule = Rule(
            newest=settings.newest, best=settings.best, check="size" if settings.check == "size" else "read"
        )
        self._copies: RunCopies | None = None

    def run(self) -> None:
        """Copy until the process ends."""
        with contextlib.suppress(MtrainError):  # told with the first checkpoint
            Place(self._settings.address).check_package()  # loads the library, which takes seconds
        while True:
            path = Path(self._waiting.take())
            started = time.perf_counter()
            told = {"name": path.name, "update": int(path.name.rpartition("-")[2])}
            watch = threading.Timer(self._settings.timeout_s, self._give_up, [told])
            watch.daemon = True
            watch.start()
            result = self._copied(path)
            watch.cancel()
            tell({**told, **result, "seconds": round(time.perf_counter() - started, 3)})

    def _give_up(self, told: dict[str, Any]) -> None:
        """End this process, whose library hangs; rank 0 starts another one for the next checkpoint."""
        seconds = self._settings.timeout_s
        reason = f"it took longer than {seconds:g} s (checkpoint.copy_timeout_s)"
        tell({**told, "error": reason, "seconds": seconds, "bytes": 0})
        os._exit(1)

    def _copied(self, path: Path) -> dict[str, Any]:
        pause_s, error = PAUSE_S, ""
        for attempt in range(TRIES):
            try:
                return {"bytes": self._copy(path)}
            except FileNotFoundError:
                return {"bytes": 0, "passed_over": True}
            except (PlaceError, BadCopy, MtrainError) as problem:
                error = str(problem)
                if not isinstance(problem, PlaceError) or problem.lasting:
                    break
            except Exception as problem:  # The job must hear of it, whatever it is.
                error = reason_of(problem)
                break
            if attempt == TRIES - 1 or self._waiting.path is not None:
                break
            time.sleep(pause_s)
            pause_s *= 2
        return {"bytes": 0, "error": error}

    def _copy(self, path: Path) -> int:
        run = form.own_id(self._run_dir) or form.write_id(self._run_dir)
        if self._copies is None:
            copies = RunCopies(Place(self._settings.address))
            copies.claim(run)
            self._copies = copies
        return self._copies.add(path, self._run_dir, run, self._rule)


def tell(message: dict[str, Any]) -> None:
    """Write one line to rank 0."""
    os.write(ANSWERS, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Copy what standard input names."""
    # A request to end is meant for the job, which waits for the copy of its last checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(1, ANSWERS)
    os.dup2(2, 1)
    os.nice(NICENESS)
    runfolder.keep_private()
    first = json.loads(sys.stdin.buffer.readline())
    settings = Settings(**{each.name: first[each.name] for each in fields(Settings)})
    waiting = _Waiting()
    threading.Thread(target=Copying(settings, waiting).run, daemon=True).start()
    for line in iter(sys.stdin.buffer.readline, b""):
        waiting.put(str(json.loads(line)["checkpoint"]))
    os._exit(0)


if __name__ == "__main__":
    main()
