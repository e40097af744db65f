"""Where a check runs: one rank inside a backend, with what one rank of ``solo`` has found."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil

from mtrain.core.interfaces import Array, Backend, Precision
from mtrain.errors import SpecError
from mtrain.testing.convnet import build
from mtrain.testing.training import BOUNDS, Case

CHECKPOINTS = "checkpoints"
LOGITS = "logits"
CLIPPED = "clipped"
FIRST_UPDATE = "first-update"
THREADS = "threads"
JOB = "MTRAIN_CONFORMANCE_JOB"
"""Variable that marks all processes of one job."""
SETTLING_S = 5.0
"""For what a backend has ended to disappear."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one rank of ``solo`` has learnt, as files in a folder."""

    folder: Path
    precision: Precision

    def arrays(self, name: str) -> dict[str, Array]:
        """The arrays of one file."""
        return dict(np.load(self.file(name)))

    def file(self, name: str) -> Path:
        """Where the arrays called ``name`` are."""
        return self.folder / f"{name}-{self.precision}.npz"

    def learnt(self, case: Case) -> dict[str, Array]:
        """What ``training.train`` returned."""
        return self.arrays(case.reference.key)

    def checkpoints(self) -> Path:
        """Folder of the checkpoint after three updates of ``HALF_WAY``."""
        return self.folder / f"{CHECKPOINTS}-{self.precision}"


@dataclass(frozen=True, kw_only=True)
class Site:
    """One rank inside ``with backend:``."""

    backend: Backend
    ranks: int
    """As many were started."""
    references: Path

    @cached_property
    def precision(self) -> Precision:
        """float64 where the backend has it. Every rank asks for it first at the same place."""
        try:
            self.backend.prepare(build, Case().recipe(self.backend.collective.size))
        except SpecError:
            return "fp32"
        return "fp64"

    @property
    def bound(self) -> float:
        """Largest relative difference that the order of additions explains."""
        return BOUNDS[self.precision]

    @property
    def reference(self) -> Reference:
        """Of ``solo`` in the precision of this backend."""
        return Reference(folder=self.references, precision=self.precision)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a process holds of the machine."""

    threads: Mapping[str, int]
    """Name -> how many native threads have it."""
    python_threads: frozenset[int]
    processes: frozenset[int]
    """Ids of all processes of the job."""

    @classmethod
    def now(cls, job: str) -> "Surroundings":
        """Of this process, and of the processes that ``JOB`` marks with ``job``."""
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
    except OSError:  # it has just ended
        return ""


def processes_of(job: str) -> list[int]:
    """Ids of the living processes that were started in the job marked ``job``, wherever they hang now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(JOB) == job and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def listening_ports(processes: list[int]) -> list[int]:
    """TCP ports on which ``processes`` listen."""
    found = set()
    for pid in processes:
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:
            continue
        found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return sorted(found)


def settled(look: Callable[[], list[str]]) -> list[str]:
    """What ``look`` finds once it finds nothing, or after ``SETTLING_S``."""
    deadline = time.monotonic() + SETTLING_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def own_id() -> int:
    """Of this process."""
    return os.getpid()
