"""Start users' scripts through the real command line, and read what they have trained."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mtrain.core.checkpoint import store
from tests import warm

SCRIPTS = Path(__file__).parent / "scripts"


# One thread per rank: on some processors the bits of a sum depend on the number of threads.
QUIET = ("-o", "report.plots=false", "report.tensorboard=false", "cluster.threads=1")


def run(
    here: Path, *words: str, timeout_s: float = 300, environ: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``mtrain run`` with ``words`` in the folder ``here``: as a copy of a warm process where that is possible.

    It is not where libraries have read one of ``environ``, further variables, already, and not for scripts of Paddle.
    """
    env = {**os.environ, **(environ or {})}
    if warm.is_torch(words) and not any(map(warm.is_read_at_import, environ or {})):
        return warm.mtrain("run", *QUIET, *words, cwd=here, env=env, timeout=timeout_s)
    line = [sys.executable, "-m", "mtrain", "run", *QUIET, *words]
    return subprocess.run(line, cwd=here, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)


def done(here: Path, *words: str, environ: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    """Run ``mtrain run`` and check that it succeeds."""
    result = run(here, *words, environ=environ)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def summary(here: Path, name: str) -> dict:
    """Return the summary of a run."""
    return json.loads((here / "runs" / name / "summary.json").read_text())


def weights(here: Path, name: str) -> dict:
    """Return the weights of a run's newest checkpoint."""
    return dict(store.load(store.newest(here / "runs" / name / "checkpoints")).state.weights)


def largest_difference(one: dict, other: dict) -> float:
    """Return the largest difference between arrays of the same names."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name].astype(np.float64) - other[name].astype(np.float64)).max()) for name in one)
