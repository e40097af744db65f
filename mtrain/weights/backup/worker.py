"""The process that copies checkpoints: ``python -m mtrain.weights.backup.worker``, started by rank 0 of a job.

It is a process of its own, so that it takes nothing from the training but processor time, at the lowest priority, and
so that a library that hangs or crashes harms nobody. Lines of JSON are its interface. On standard input: first
``CopySettings``, then ``{"name", "from"}`` for each checkpoint: its name and the folder of its files. They are copied one
after the other. On standard output, for each one: ``{"name", "update", "seconds", "bytes"}``, with ``error`` if it
failed, ``ends`` if the process ends because of that, or ``passed_over`` if the files are no longer there; and
``{"moved": NAME}`` now and then while a copy makes progress. When standard input ends, the process ends at once.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mtrain.errors import MtrainError
from mtrain.system import runfolder
from mtrain.weights.backup import form
from mtrain.weights.backup.form import BadCopy
from mtrain.weights.backup.place import PlaceError, StorageFolder, reason_of
from mtrain.weights.backup.run_copies import KeepingRule, RunCopies

TRIES = 3
"""How often a copy is tried, unless the reason of a failure is lasting."""
PAUSE_S = 1.0
"""Seconds before the second try; each further pause is twice as long."""
TOLD_IN_TIMEOUT = 4
"""How often in ``timeout_s`` it is told that a copy makes progress."""
NICENESS = 10
ANSWERS = 3
"""Descriptor of what was standard output; what libraries print goes to standard error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopySettings:
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


class Copying:
    """Copies one checkpoint after the other, and tells how each went."""

    def __init__(self, settings: CopySettings, asked: "SimpleQueue[Mapping[str, str]]") -> None:
        self._settings = settings
        self._ask_storage = asked
        self._run_dir = Path(settings.run_dir)
        self._rule = KeepingRule(
            newest=settings.newest, best=settings.best, check="size" if settings.check == "size" else "read"
        )
        self._copies: RunCopies | None = None
        self._watch: StallWatch | None = None
        self._name = ""
        self._told_at = 0.0

    def run(self) -> None:
        """Copy until the process ends."""
        # Libraries of storage take seconds to load: they do so while the first checkpoint is not there yet.
        with contextlib.suppress(MtrainError):  # told with the first checkpoint
            StorageFolder(self._settings.address).check_package()
        while True:
            asked = self._ask_storage.get()
            started, self._name = time.perf_counter(), asked["name"]
            told = {"name": self._name, "update": int(self._name.rpartition("-")[2])}
            with StallWatch(self._settings.timeout_s, lambda told=told: self._give_up(told)) as self._watch:  # type: ignore[misc]
                result = self._copy_files(Path(asked["from"]))
            tell({**told, **result, "seconds": round(time.perf_counter() - started, 3)})

    def _give_up(self, told: Mapping[str, Any]) -> None:
        """End this process, whose library hangs; rank 0 starts another one for the next checkpoint."""
        seconds = self._settings.timeout_s
        reason = f"nothing of it has arrived for {seconds:g} s (checkpoint.copy_timeout_s)"
        tell({**told, "error": reason, "seconds": seconds, "bytes": 0, "ends": True})
        os._exit(1)

    def _note_progress(self) -> None:
        """Note that the copy makes progress, and tell so now and then."""
        if self._watch is not None:
            self._watch.note_progress()
        if time.monotonic() - self._told_at > self._settings.timeout_s / TOLD_IN_TIMEOUT:
            self._told_at = time.monotonic()
            tell({"moved": self._name})

    def _copy_files(self, path: Path) -> dict[str, Any]:
        pause_s, error = PAUSE_S, ""
        for attempt in range(TRIES):
            self._note_progress()
            try:
                return {"bytes": self._copy(path)}
            except FileNotFoundError:
                return {"bytes": 0, "passed_over": True}
            except (PlaceError, BadCopy, MtrainError) as problem:
                error = str(problem)
                # What is damaged or forbidden stays so; a network may come back.
                if not isinstance(problem, PlaceError) or problem.lasting:
                    break
            except Exception as problem:  # The job must hear of it, whatever it is.
                error = reason_of(problem)
                break
            if attempt < TRIES - 1:
                time.sleep(pause_s)
                pause_s *= 2
        return {"bytes": 0, "error": error}

    def _copy(self, path: Path) -> int:
        run = form.own_id(self._run_dir) or form.write_id(self._run_dir)
        if self._copies is None:
            copies = RunCopies(StorageFolder(self._settings.address, moved=self._note_progress))
            copies.claim(run)
            self._copies = copies
        return self._copies.add(path, self._run_dir, run, self._rule, name=self._name)


def tell(message: dict[str, Any]) -> None:
    """Write one line to rank 0."""
    os.write(ANSWERS, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Copy what standard input names."""
    # A request to end is meant for the job, which waits for the copy of its last checkpoint.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Libraries may print at any time, which must not stand between the answers.
    os.dup2(1, ANSWERS)
    os.dup2(2, 1)
    os.nice(NICENESS)
    # The folder of a local copy holds weights and the spec, as the run folder does.
    runfolder.keep_private()
    first = json.loads(sys.stdin.buffer.readline())
    settings = CopySettings(**{each.name: first[each.name] for each in fields(CopySettings)})
    asked: SimpleQueue[Mapping[str, str]] = SimpleQueue()
    threading.Thread(target=Copying(settings, asked).run, daemon=True).start()
    for line in iter(sys.stdin.buffer.readline, b""):
        asked.put(json.loads(line))
    os._exit(0)


LOOKS = 20
"""Looks in the time after which work counts as stalled."""


class StallWatch:
    """Calls ``give_up`` when nothing has moved for ``timeout_s`` seconds, from a thread of its own."""

    def __init__(self, timeout_s: float, give_up: Callable[[], None]) -> None:
        self._pause_s = timeout_s / LOOKS
        self._give_up = give_up
        self._ended = threading.Event()
        self._idle_looks = 0

    def __enter__(self) -> "StallWatch":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()

    def note_progress(self) -> None:
        """Learn that the work goes on."""
        self._idle_looks = 0

    def look(self) -> bool:
        """Return whether nothing has moved for so many looks that the work has stalled."""
        # Looks are counted and not the time: while the process is stopped, or gets no processor, nobody looks.
        self._idle_looks += 1
        return self._idle_looks > LOOKS

    def _watch(self) -> None:
        while not self._ended.wait(self._pause_s):
            if self.look():
                self._give_up()
                return


if __name__ == "__main__":
    main()
