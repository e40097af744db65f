"""Fixtures of the kit's tests: the results of one rank of solo on torch, with which the kit compares others."""

import os
import subprocess
import sys
from pathlib import Path

from mtrain.system import environment
from mtrain_kit import kit
from mtrain_kit.jobs import PluginTestRequest

ROOT = Path(__file__).parents[4]
KIT = Path(__file__).parents[2]
PATH = os.pathsep.join(map(str, (ROOT, KIT)))
"""The package `tests` lies in both folders."""


def wanted(backend: str, **settings: object) -> PluginTestRequest:
    """The kit on this interpreter, outside of any job."""
    environ = {**environment.clean(dict(os.environ)), "PYTHONPATH": PATH}
    return PluginTestRequest(name=backend, environ=environ, **settings)  # type: ignore[arg-type]


def solo_learns(folder: Path) -> Path:
    """Folder of what solo learns on torch."""
    actual = kit.run(wanted("solo", only=["learns.sgd"]), folder)
    assert actual.has_passed
    return folder / "references"


def mtrain(*argv: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """The command line, run in ``cwd``."""
    environ = {**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [sys.executable, "-m", "mtrain", *argv], cwd=cwd, env=environ, capture_output=True, text=True, timeout=540
    )
