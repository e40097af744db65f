"""Horovod's optimizer is recorded with the gradients that it has exchanged, which it does within its own step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import causes, comparing, reading

pytestmark = pytest.mark.job

SCRIPT = Path(__file__).parent / "horovod_script.py"
TWO = [str(Path(sys.executable).parent / "horovodrun"), "-np", "2", "--gloo"]


def record(out: Path, *front: str, **variables: str) -> Path:
    words = [sys.executable, "-m", "mtrain_trace", "run", "--out", out, "--", *front, sys.executable, SCRIPT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cannot record" not in done.stderr
    return out


def test_two_ranks_of_horovod_train_what_one_trains(tmp_path: Path) -> None:
    one, two = reading.read(record(tmp_path / "one")), reading.read(record(tmp_path / "two", *TWO))
    assert two.ranks == 2
    assert len(one.updates) == 6  # the step on zeros, by which the state is broadcast, is none
    assert set(one.start) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    result = comparing.compare(one, two)
    assert result.verdict == "same up to rounding"
    assert max(result.curves[comparing.GRADIENT]) < 1e-6


@pytest.mark.slow
def test_gradients_that_are_averaged_twice_are_named(tmp_path: Path) -> None:
    right, twice = record(tmp_path / "right", *TWO), record(tmp_path / "twice", *TWO, DIVIDED="1")
    result = comparing.compare(reading.read(right), reading.read(twice))
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (comparing.GRADIENT, 1)
    assert "averaged twice" in causes.explain(result)[0]
