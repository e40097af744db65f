"""Loops as people write them: what is wrong in one is named, or the place without a false cause; right ones raise no alarm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import command, comparing, differences, reading
from mtrain_trace.comparing import Comparison
from tests.once import once
from tests.starts import starts_processes

pytestmark = [pytest.mark.job, pytest.mark.smoke]

LOOPS = Path(__file__).parent / "loops.py"


@pytest.fixture(scope="module")
@starts_processes
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of all loops: one process, whose copies train."""

    def train(out: Path) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, LOOPS, out], env=environ, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        assert "cannot record" not in done.stderr

    return once(tmp_path_factory, "loops", train)


def compared(traces: Path, a: str, b: str) -> Comparison:
    (result,) = command.compare_folders(traces / a, traces / b)
    return result


@pytest.mark.parametrize(
    "pair",
    [
        "language language-two",
        "unnamed unnamed-two",
        "ordered ordered-two",
        "split split-two",
        "steps steps-two",
        "cell-steps cell-steps-two",
        "attention attention-two",
        "steps-square steps-square-two",
        "steady renewed-loaded",
        "renewed-anew renewed-two",
    ],
)
def test_clean_pairs_raise_no_alarm(traces: Path, pair: str) -> None:
    result = compared(traces, *pair.split())
    assert result.parting is None, result.sentences
    assert not result.findings
    assert any("two axes" in remark for remark in result.remarks) == ("square" in pair)
    assert "square" in pair or result.remarks == []  # the samples are the same, bit for bit


@pytest.mark.parametrize("name", ["steps", "steps-two", "cell-steps-two", "attention-two"])
def test_samples_are_the_columns_where_a_layer_reads_steps_by_samples(traces: Path, name: str) -> None:
    trace = reading.read(traces / name)
    assert trace.samples_per_update == 8
    assert [len(set(update.samples)) for update in trace.updates] == [8] * 5


MISTAKES = [
    ("language", "language-not-shifted", comparing.TARGETS, "their labels are not"),
    ("named", "named-not-shifted", comparing.TARGETS, "their labels are not"),
    ("unnamed", "unnamed-not-shifted", comparing.TARGETS, "their labels are not"),
    ("summed", "summed-two", comparing.LOSS, "that of A: a sum over the samples of a pass (reduction='sum')"),
    ("summed-two", "summed", comparing.LOSS, "that of A: a sum over the samples of a pass (reduction='sum')"),
    ("summed", "summed-halves", comparing.LOSS, "that of A: a sum over the samples of a pass (reduction='sum')"),
    ("summed-by-hand", "summed-by-hand-two", comparing.LOSS, "Or it is a sum over the samples of a pass"),
    ("meant", "summed", comparing.LOSS, "a loss of B is a sum over its targets (reduction='sum'), that of A is not"),
    ("ordered", "clip-first", comparing.GRADIENT, "B clips before the backward pass of the update has ended"),
    ("clip-first-two", "ordered-two", comparing.GRADIENT, "A clips before the backward pass"),
    ("ordered", "cleared", comparing.GRADIENT, "B clears its gradients (zero_grad) after the backward pass"),
    ("cleared-to-zeros", "ordered", comparing.GRADIENT, "A clears its gradients (zero_grad) after the backward pass"),
    ("headed", "headed-late", comparing.START, "layers were replaced after the optimizer was made"),
    ("unmixed", "mixed-two", comparing.LOSS, "a softmax or a mean over the axis of samples (dim=0)"),
    ("split", "own-splits", comparing.SAMPLES, "a rank of B reads samples that another rank has read"),
    ("split-long", "own-splits-long", comparing.SAMPLES, "a rank of B reads samples that another rank has read"),
    ("split", "another-split", comparing.SAMPLES, "B sees 11 samples that A never sees"),
    ("started", "started-seed", comparing.START, "another seed (1 in A, 2 in B)"),
    (
        "started",
        "started-loaded",
        comparing.START,
        "1 of 8 arrays start otherwise (body.0.weight): weights that were loaded",
    ),
    ("steady", "renewed-anew", differences.MOMENTS, "B goes on with another optimizer of the same arrays"),
    ("renewed-anew", "steady", differences.MOMENTS, "A goes on with another optimizer of the same arrays"),
    ("steady-adam", "renewed-adam", differences.MOMENTS, "B goes on with another optimizer of the same arrays"),
    ("steady", "renewed-groups", comparing.SETTINGS, "B goes on with another optimizer of the same arrays"),
    ("steady", "renewed-rule", differences.MOMENTS, "B goes on with another optimizer of the same arrays"),
]


@pytest.mark.parametrize(("a", "b", "what", "cause"), MISTAKES, ids=[f"{a}-{b}" for a, b, *_ in MISTAKES])
def test_the_mistake_is_named_and_no_other(traces: Path, a: str, b: str, what: str, cause: str) -> None:
    result = compared(traces, a, b)
    assert result.parting is not None
    assert result.parting.what == what
    assert cause in result.sentences[0]
    assert len(result.sentences) == 1
    told = result.sentences[0]
    assert "averaged twice" not in told or "by-hand" in b
    assert "frozen (requires_grad)" not in told
    assert "hidden state" not in told
