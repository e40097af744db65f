"""Trainings by Paddle are told from others of the same, and planted mistakes are named; those that are right raise no alarm."""

import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import causes, comparing, differences, reading
from mtrain_trace.comparing import Comparison
from tests.starts import starts_processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
@starts_processes
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of all trainings of the zoo: one process, whose copies train."""
    out = tmp_path_factory.mktemp("zoo")
    words = [sys.executable, "-m", "tests.trace.paddle_zoo", out]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "cannot record" not in done.stderr
    return out


def compared(traces: Path, a: str, b: str) -> Comparison:
    result = comparing.compare(reading.read(traces / a), reading.read(traces / b))
    result.sentences = causes.explain(result)
    return result


@pytest.mark.parametrize("pair", ["plain again", "plain minimized", "plain held", "two fleet", "norm norm-again"])
def test_trainings_of_the_same_bits_are_called_so(traces: Path, pair: str) -> None:
    assert compared(traces, *pair.split()).verdict == "same bits"


@pytest.mark.parametrize(
    "pair",
    [
        "plain two",
        "plain fleet",
        "plain halves",
        "plain two-halves",
        "plain groups",
        "adam adam-two",
        "adam adam-halves",
        "adam adam-groups",
    ],
)
def test_other_ranks_passes_and_groups_of_the_same_training_are_rounding(traces: Path, pair: str) -> None:
    result = compared(traces, *pair.split())
    assert result.verdict == "same up to rounding"
    assert max(result.curves[differences.WEIGHTS]) < 1e-4
    assert max(result.curves[differences.GRADIENT]) < 1e-5
    assert max(result.curves[differences.MOMENTS]) < 1e-5
    assert result.b.ranks == (2 if "two" in pair or "fleet" in pair else 1)


MISTAKES = [
    ("halves", "undivided", differences.LOSS, 1, "not divided by the 2 micro batches"),
    ("two-halves", "no-sync", differences.GRADIENT, 1, "not exchanged"),
    ("two", "unwrapped", differences.GRADIENT, 1, "not exchanged"),
    ("plain", "unclipped", differences.GRADIENT, 1, "A clips the gradient to a norm of 0.5"),
    ("unclipped", "plain", differences.GRADIENT, 1, "B clips the gradient to a norm of 0.5"),
    ("plain", "clipped", differences.GRADIENT, 1, "A clips to a norm of 0.5, B to 0.25"),
    ("two", "labels-of-a-rank", differences.TARGETS, 1, "rank 1 of B has other labels"),
    ("two", "set-epoch", differences.SAMPLES, 9, "set_epoch"),
    ("two", "same-shard", differences.SAMPLES, 1, "all ranks of B read the same samples"),
    ("two", "summed", differences.CLIP, 1, "summed over ranks"),
    ("plain", "not-cleared", differences.GRADIENT, 2, "gradients are not cleared"),
    ("plain", "schedule", differences.SETTINGS, 7, "lr 0.1 and 0.01"),
    ("two", "rate-of-one-rank", differences.SETTINGS, 7, "rank 1 of B has other settings than rank 0"),
    ("adam", "decay", differences.SETTINGS, 1, "weight_decay 0.1 and 0.2"),
    ("norm", "eval-mode", differences.LOSS, 5, "7 modules of B are in evaluation mode"),
    ("norm", "norm-momentum", differences.BUFFERS, 1, "running means of B are 9 times those of A (1.running_mean)"),
    (
        "plain",
        "average-stays",
        differences.LOSS,
        7,
        "something else than the optimizer has written to the weights of B",
    ),
    ("plain", "frozen", differences.GRADIENT, 1, "one side alone has a gradient of 0.weight"),
    ("plain", "rmsprop", differences.MOMENTS, 1, "A steps by SGD, B by RMSProp"),
]


@pytest.mark.parametrize(("a", "b", "what", "update", "cause"), MISTAKES, ids=[f"{a}-{b}" for a, b, *_ in MISTAKES])
def test_the_first_thing_that_parts_is_named_with_its_cause(
    traces: Path, a: str, b: str, what: str, update: int, cause: str
) -> None:
    result = compared(traces, a, b)
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (what, update)
    assert cause in result.sentences[0]


def test_the_loss_the_rate_and_the_norm_are_those_of_the_script(traces: Path) -> None:
    trace = reading.read(traces / "schedule")
    assert [update.rates[0]["lr"] for update in trace.updates] == pytest.approx([0.1] * 6 + [0.01] * 4)
    assert trace.updates[0].rates[0] == {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "nesterov": False}
    clip = trace.updates[0].clips[0]
    assert clip is not None
    assert clip["before"] > clip["limit"] == 0.5
    assert trace.updates[0].norm == pytest.approx(0.5, rel=1e-5)
    assert trace.samples_per_update == 8
