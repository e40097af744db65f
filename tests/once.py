"""What many tests read is made once in a run of tests: the first worker that needs it makes it, the others wait for it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder ``name``, which ``make`` has filled once for all workers. Nobody changes it: tests that do copy it first."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the folder that all workers of this run have theirs in
    folder, done = root / "once" / name, root / "once" / f"{name}.done"
    folder.parent.mkdir(exist_ok=True)
    with open(folder.parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
