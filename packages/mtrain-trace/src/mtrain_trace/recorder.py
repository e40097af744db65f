"""The files of a trace: one folder for each process that trains, with lines of JSON.

``process.json`` says who the process is (rank, ranks, versions, settings) and what each optimizer holds;
``updates.jsonl`` has a line for each update, ``arrays.jsonl`` a line for each update at which every array is recorded.
Framework-specific modules fill these; nothing here imports a framework.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Mapping
from multiprocessing import util
from pathlib import Path
from typing import IO, Any

from mtrain_trace import masking, mixing

# Most faults of a set-up show at once.
FIRST_DETAILED = 8
"""Updates at the beginning whose arrays are recorded one by one."""
DETAILED_EVERY = 50
PROCESS, UPDATES, ARRAYS = "process.json", "updates.jsonl", "arrays.jsonl"
# Digests and sketches of another form are made otherwise, so nothing of two forms can be compared.
FORM = 2
"""Number of this form of traces."""
ZEROS = "zeros"
"""State of a recurrent layer that begins with nothing of the update before."""
EVERY_VARIABLE, AT_VARIABLE, NUDGE_VARIABLE = "MTRAIN_TRACE_EVERY", "MTRAIN_TRACE_AT", "MTRAIN_TRACE_NUDGE"
UPDATES_VARIABLE = "MTRAIN_TRACE_UPDATES"
STACKS = ("deepspeed", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "horovod")
"""Packages on top of torch that change how an update is made; those loaded are noted."""
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
"""Variables by which starters tell a process its number and how many there are, in the order in which they count."""


class Recorder:
    """Writes the trace of this process. The folder appears with the first update, so launchers and workers leave none.

    Args:
        out: folder of the trace, which all processes of a training share.
        every: full records (gradients, weights, moments) are made at every n-th update; losses, samples and settings at
            each.
        at: updates whose arrays are recorded one by one in addition to the usual ones.
    """

    def __init__(self, out: str, *, every: int | None = None, at: frozenset[int] | None = None) -> None:
        self.out = Path(out)
        self.every = every if every is not None else int(os.environ.get(EVERY_VARIABLE) or 1)
        listed = os.environ.get(AT_VARIABLE, "").split(",")
        self.at = at if at is not None else frozenset(int(number) for number in listed if number)
        self.nudge = bool(os.environ.get(NUDGE_VARIABLE))
        self.updates = int(os.environ.get(UPDATES_VARIABLE) or 0)
        """Updates after which this process ends; 0: it ends by itself."""
        self._files: dict[str, IO[str]] = {}
        self._facts: dict[str, Any] = {}
        self._folder: Path | None = None
        self._process = 0
        """The process that this is the trace of, which may be a copy of the one that has imported the framework; 0: none yet."""
        self._finishers: list[Any] = []

    def is_full(self, update: int) -> bool:
        """Return whether gradients, weights and moments of an update (from 1) are recorded."""
        return update % self.every == 0 or update <= FIRST_DETAILED or self.is_detailed(update)

    def is_detailed(self, update: int) -> bool:
        """Return whether each array of an update (from 1) is recorded for itself."""
        if update in self.at or update <= FIRST_DETAILED:
            return True
        return update % DETAILED_EVERY == 0 or update & (update - 1) == 0

    def before_close(self, finish: Any) -> None:
        """Call ``finish`` before the files are closed: it writes records that are still on their way to the host."""
        self._finishers.append(finish)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Add facts about this process, and write ``process.json`` anew."""
        if self._is_in_a_copy():
            return
        self._facts.update(facts)
        path = self._open_folder() / PROCESS
        temporary = path.with_suffix(".tmp")
        with _open_own(temporary, "w") as file:
            file.write(json.dumps(self._facts, indent=1, default=str))
        temporary.replace(path)

    def write(self, file: str, record: Mapping[str, Any]) -> None:
        """Append a line to ``updates.jsonl`` or ``arrays.jsonl``."""
        if self._is_in_a_copy():
            return
        if file not in self._files:
            self._files[file] = _open_own(self._open_folder() / file, "a")
        self._files[file].write(json.dumps(record, separators=(",", ":")) + "\n")
        self._files[file].flush()  # a training that is killed leaves a whole trace up to there

    def write_update(self, record: dict[str, Any], parts: Mapping[str, Mapping[str, list[Any]]]) -> None:
        """Append an update, and each of its arrays where it is recorded in detail; ``parts``: rows of the arrays by name."""
        for part, arrays in parts.items():
            record[part] = mixing.together(arrays.values())
        self.write(UPDATES, record)
        if parts and self.is_detailed(record["update"]):
            self.write(ARRAYS, {"update": record["update"], "optimizer": record["optimizer"], **parts})

    def end_after(self, updates: int) -> None:
        """End this process if it has made as many updates as are asked for; nothing of it runs afterwards."""
        if self.updates and updates >= self.updates:
            self.close()
            sys.stdout.flush()
            sys.stderr.flush()
            # The training must not go on in handlers of exit, such as a last checkpoint.
            os._exit(0)

    def close(self) -> None:
        """Write what is outstanding and close the files. Copies of a process that trains (data workers) close nothing."""
        if self._is_in_a_copy():
            return
        for end in (*self._finishers, *(file.close for file in self._files.values())):
            try:
                end()
            except OSError as error:  # of a full disk; what was written before stays
                print(f"mtrain-trace: the trace cannot be written: {error}", file=sys.stderr)
        self._finishers = []
        self._files = {}

    def _is_in_a_copy(self) -> bool:
        """Return whether this is a copy of a process that trains: what it computes is none of its updates."""
        return self._process not in (0, os.getpid())

    def _open_folder(self) -> Path:
        if self._folder is None:
            rank, _ = place()
            self._folder = self.out / f"rank-{rank:05d}-{socket.gethostname()}-{os.getpid()}"
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A fork of this process (a data worker) inherits the recorder and must write nothing.
            self._process = os.getpid()
            atexit.register(self.close)
            util.Finalize(None, self.close, exitpriority=0)  # processes of multiprocessing end without atexit
        return self._folder


def _open_own(path: Path, mode: str) -> IO[str]:
    """Open a file that its owner alone may read: names of samples and command lines are nobody else's business."""
    return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))


def place() -> tuple[int, int]:
    """Return (number of this process, number of processes) of the training, from 0."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    for rank, size in RANK_VARIABLES:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def facts_of_process() -> dict[str, Any]:
    """Return what is known of this process without a framework."""
    rank, ranks = place()
    return {
        "form": FORM,
        "rank": rank,
        "ranks": ranks,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": masking.mask_words(sys.argv),
        "python": sys.version.split()[0],
        "stacks": [name for name in STACKS if name in sys.modules],
    }
