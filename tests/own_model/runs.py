"""Start jobs on users' own models through the real command line, and read what they have trained."""

import json
import subprocess
import sys
from pathlib import Path

from tests import warm

HERE = Path(__file__).parent
CODE = HERE / "code"
EXAMPLE = HERE.parents[1] / "examples" / "own-model"
QUIET = ("-o", "report.plots=false", "-o", "report.tensorboard=false")


def command(here: Path, *words: str, timeout_s: float = 240) -> "subprocess.CompletedProcess[str]":
    """Run ``mtrain`` with ``words`` in the folder ``here``, as a copy of a warm process where that is possible."""
    if warm.is_torch(words):
        return warm.mtrain(*words, cwd=here, timeout=timeout_s)
    line = [sys.executable, "-m", "mtrain", *words]
    return subprocess.run(line, cwd=here, capture_output=True, text=True, timeout=timeout_s, check=False)


def trained(here: Path, name: str, spec: Path, *words: str) -> dict:
    """Train a spec in the run folder ``name`` and return the run's summary."""
    result = command(here, "train", "-c", str(spec), "--name", name, *QUIET, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((here / "runs" / name / "summary.json").read_text())


def refused(here: Path, *words: str) -> str:
    """Run ``mtrain`` and return the message with which it refuses: exit code 2, no traceback."""
    result = command(here, *words, timeout_s=120)
    assert result.returncode == 2, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.stdout + result.stderr, result.stdout + result.stderr
    return result.stdout + result.stderr


def losses(here: Path, name: str) -> list[float]:
    """Return the loss of each update of a run."""
    lines = (here / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["losses"]["total"] for record in records if record.get("kind") == "update"]
