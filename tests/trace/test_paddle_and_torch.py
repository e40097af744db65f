"""A training by torch and the same by Paddle are compared array by array, and the mistake between them is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import causes, comparing, differences, reading
from mtrain_trace.comparing import Comparison
from tests.starts import starts_processes

ROOT = Path(__file__).parents[2]
TORCH = ("plain", "norm", "adam", "named")
PADDLE = ("plain", "two", "norm", "norm-momentum", "adam", "rmsprop", "clipped", "decay", "labels-of-a-rank")


@pytest.fixture(scope="module")
@starts_processes
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("twins")
    for module, names in (("torch_twin", TORCH), ("paddle_zoo", PADDLE)):
        words = [sys.executable, "-m", f"tests.trace.{module}", out / module, *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "cannot record" not in done.stderr
    return out


def compared(traces: Path, a: str, b: str) -> Comparison:
    result = comparing.compare(reading.read(traces / "torch_twin" / a), reading.read(traces / "paddle_zoo" / b))
    result.sentences = causes.explain(result)
    return result


@pytest.mark.parametrize("pair", ["plain plain", "plain two", "adam adam", "norm norm"])
def test_the_same_training_by_torch_and_by_paddle_differs_by_rounding_alone(traces: Path, pair: str) -> None:
    result = compared(traces, *pair.split())
    assert result.verdict == "same up to rounding"
    start = {name: row.digest for name, row in result.a.start.items()}
    assert start == {name: row.digest for name, row in result.b.start.items()}
    assert result.a.updates[0].samples == result.b.updates[0].samples
    assert result.a.updates[0].targets == result.b.updates[0].targets
    for what in (differences.WEIGHTS, differences.GRADIENT, differences.MOMENTS):
        assert max(result.curves[what]) < 1e-4
    if "norm" in pair:
        assert "running variances of BatchNorm are not compared" in result.remarks[-1]
        assert max(value for value in result.curves[differences.BUFFERS] if value == value) < 1e-5


@pytest.mark.parametrize(
    ("a", "b", "what", "cause"),
    [
        ("norm", "norm-momentum", differences.BUFFERS, "running means of B are 9 times those of A (1.running_mean)"),
        ("plain", "clipped", differences.GRADIENT, "A clips to a norm of 0.5, B to 0.25"),
        ("adam", "decay", differences.SETTINGS, "weight_decay 0.1 and 0.2"),
        ("plain", "rmsprop", differences.MOMENTS, "A steps by SGD, B by RMSProp"),
        ("plain", "labels-of-a-rank", differences.TARGETS, "their labels are not"),
    ],
)
def test_a_mistake_between_the_two_is_named(traces: Path, a: str, b: str, what: str, cause: str) -> None:
    result = compared(traces, a, b)
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (what, 1)
    assert cause in result.sentences[0]


def test_other_meanings_of_the_momentum_of_batch_norm_are_told(traces: Path) -> None:
    assert "Paddle's that of the old ones (0.9)" in compared(traces, "norm", "norm-momentum").sentences[0]


def test_of_arrays_with_other_names_norms_are_compared_and_the_rest_is_told(traces: Path) -> None:
    result = compared(traces, "named", "plain")
    assert result.verdict == "same up to rounding"
    assert "arrays have other names (first.bias, first.weight" in result.remarks[-1]
    assert max(result.curves[differences.GRADIENT]) < 1e-5
    assert differences.WEIGHTS not in result.curves
    clipped = compared(traces, "named", "clipped")
    assert clipped.parting is not None
    assert clipped.parting.what == differences.CLIP
    decayed = differences.settings_differences(
        reading.read(traces / "torch_twin" / "named").updates[0],
        reading.read(traces / "paddle_zoo" / "decay").updates[0],
    )
    assert "lr 0.1 and 0.01" in decayed
