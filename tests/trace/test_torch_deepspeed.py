"""DeepSpeed's engine is recorded as plain torch is: the same names, bits of the start, gradients, masters, moments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import causes, comparing, reading
from mtrain_trace.comparing import Comparison
from tests.starts import starts_processes

PROGRAM = Path(__file__).parent / "deepspeed_cases.py"
FAST = ["plain", "ddp", "stage1", "stage3", "stage0-bfloat16", "clip-inherited"]
SLOW = [
    "plain",
    "unclipped",
    "stage0",
    "stage1",
    "stage2",
    "stage2-halves",
    "stage3",
    "stage1-bfloat16",
    "stage3-bfloat16",
    "divided-twice",
    "decay-on-biases",
]


def recorded(out: Path, names: list[str]) -> Path:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, PROGRAM, out, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cannot record" not in done.stderr
    return out


@pytest.fixture(scope="module")
@starts_processes
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("deepspeed"), FAST)


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("deepspeed"), SLOW)


def compared(traces: Path, a: str, b: str) -> Comparison:
    result = comparing.compare(reading.read(traces / a), reading.read(traces / b))
    result.sentences = causes.explain(result)
    return result


def is_the_same_training(result: Comparison) -> None:
    assert result.verdict == "same up to rounding", result.sentences
    # Nothing has been computed before the first update: parts of all ranks add up to the bits of the whole.
    assert {name: row.digest for name, row in result.a.start.items()} == {
        name: row.digest for name, row in result.b.start.items()
    }
    assert set(result.b.updates[0].arrays["gradients"]) == set(result.a.start)
    assert set(result.a.updates[0].arrays["moments"]) == set(result.b.updates[0].arrays["moments"])
    assert max(result.curves[comparing.GRADIENT]) < 2e-6
    assert max(result.curves[comparing.WEIGHTS]) < 1e-4
    assert max(result.curves[comparing.LOSS]) < 1e-6
    assert max(result.curves[comparing.CLIP]) < 1e-5


@pytest.mark.parametrize("stage", ["stage1", "stage3"])
def test_an_engine_with_zero_trains_what_plain_torch_trains(few: Path, stage: str) -> None:
    is_the_same_training(compared(few, "plain", stage))
    assert reading.read(few / stage).optimizer_facts["sharded"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage0", "stage2", "stage2-halves"])
def test_every_stage_and_accumulation_train_what_plain_torch_trains(all_of_them: Path, name: str) -> None:
    is_the_same_training(compared(all_of_them, "plain", name))


def test_a_limit_of_the_engines_own_settings_is_named(few: Path) -> None:
    result = compared(few, "ddp", "clip-inherited")
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (comparing.GRADIENT, 1)
    assert "A clips to a norm of 0.5, B to 0.1" in result.sentences[0]


def test_the_masters_of_bfloat16_are_recorded_and_the_precision_is_named(few: Path) -> None:
    result = compared(few, "plain", "stage0-bfloat16")
    assert any("A computes in float32, B in bfloat16" in remark for remark in result.remarks)
    assert len(result.b.updates) == len(result.a.updates)  # the engine's step on zeros, at its making, is none
    assert result.b.optimizer_facts["dtypes"] == ["float32"]


@pytest.mark.slow
def test_stages_in_bfloat16_agree(all_of_them: Path) -> None:
    result = compared(all_of_them, "stage1-bfloat16", "stage3-bfloat16")
    assert result.verdict == "same up to rounding"
    assert max(result.curves[comparing.WEIGHTS]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "what", "update", "cause"),
    [
        (
            "stage2-halves",
            "divided-twice",
            comparing.LOSS,
            1,
            "2 micro batches and 2 ranks: divided by one of these numbers twice",
        ),
        ("stage1", "decay-on-biases", comparing.SETTINGS, 1, "weight decay of biases and norms differs: 0.bias"),
        ("unclipped", "stage1", comparing.GRADIENT, 4, "B clips the gradient to a norm of 0.5"),
    ],
)
def test_mistakes_around_an_engine_are_named(
    all_of_them: Path, a: str, b: str, what: str, update: int, cause: str
) -> None:
    result = compared(all_of_them, a, b)
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (what, update)
    assert any(cause in sentence for sentence in result.sentences), result.sentences
