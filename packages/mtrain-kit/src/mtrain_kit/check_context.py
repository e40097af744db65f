"""The context of a check: one rank inside a backend, with the results of one rank of ``solo`` for comparison."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil

from mtrain.core.interfaces import Array, Precision, RankSession
from mtrain.errors import SpecError
from mtrain_kit.convnet import build
from mtrain_kit.training import BOUNDS, Case

CHECKPOINTS = "checkpoints"
LOGITS = "logits"
CLIPPED = "clipped"
FIRST_UPDATE = "first-update"
THREADS = "threads"
JOB = "MTRAIN_CONFORMANCE_JOB"
"""Environment variable that marks all processes of one job."""
SETTLING_S = 5.0
"""Seconds that ended processes and threads of a backend get to disappear."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The results of one rank of ``solo``, as files in a folder."""

    folder: Path
    precision: Precision

    def arrays(self, name: str) -> dict[str, Array]:
        """Load the arrays of one file."""
        return dict(np.load(self.file(name)))

    def file(self, name: str) -> Path:
        """Return the file with the arrays called ``name``."""
        return self.folder / f"{name}-{self.precision}.npz"

    def learnt(self, case: Case) -> dict[str, Array]:
        """Load the result of ``training.train``."""
        return self.arrays(case.reference.key)

    def checkpoints(self) -> Path:
        """Return the folder of the checkpoint after ``HALF_WAY`` (three) updates."""
        return self.folder / f"{CHECKPOINTS}-{self.precision}"


@dataclass(frozen=True, kw_only=True)
class Site:
    """One rank inside ``with backend as session:``."""

    session: RankSession
    ranks: int
    """Number of ranks that were started."""
    references: Path

    @cached_property
    def precision(self) -> Precision:
        """Return float64 if the backend has it. Every rank must use this first at the same place, because it calls
        ``prepare``."""
        try:
            self.session.prepare(build, Case().recipe(self.session.collective.size))
        except SpecError:
            return "fp32"
        return "fp64"

    @property
    def bound(self) -> float:
        """Return the largest relative difference that the order of additions explains."""
        return BOUNDS[self.precision]

    @property
    def reference(self) -> Reference:
        """Return the results of ``solo`` in the precision of this backend."""
        return Reference(folder=self.references, precision=self.precision)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The threads and processes that exist at one moment."""

    threads: Mapping[str, int]
    """Number of native threads by name."""
    python_threads: frozenset[int]
    processes: frozenset[int]
    """Ids of all processes of the job."""

    @classmethod
    def now(cls, job: str) -> "Surroundings":
        """Record the threads of this process, and the processes that ``JOB`` marks with ``job``."""
        tasks = Path("/proc/self/task")
        names = [_read(path) for path in tasks.glob("*/comm")] if tasks.is_dir() else []
        return cls(
            threads={name: names.count(name) for name in set(names)},
            python_threads=frozenset(thread.ident or 0 for thread in threading.enumerate()),
            processes=frozenset(processes_of(job)),
        )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the thread has just ended
        return ""


def processes_of(job: str) -> list[int]:
    """Return the ids of the living processes started in the job marked ``job``, whatever their parent is now."""
    pids = []
    for process in psutil.process_iter():
        try:
            # The parent of a process that was left behind is init: only its environment tells whose it was.
            if process.environ().get(JOB) == job and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
        except psutil.Error:
            continue
    return pids


def listening_ports(processes: list[int]) -> list[int]:
    """Return the TCP ports on which ``processes`` listen."""
    ports = set()
    for pid in processes:
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:
            continue
        ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return sorted(ports)


def wait_until_settled(look: Callable[[], list[str]]) -> list[str]:
    """Call ``look`` until it returns nothing, at most for ``SETTLING_S``; return its last result."""
    deadline = time.monotonic() + SETTLING_S
    # Threads and processes take a moment to disappear after they were told to end.
    while (remains := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remains
