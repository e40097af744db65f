"""Trainings with a planted mistake are told from their right ones, and the mistake is named; right ones raise no alarm."""

import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import causes, comparing, differences, reading
from mtrain_trace.comparing import Comparison
from tests.starts import starts_processes

ZOO = Path(__file__).parent / "zoo.py"


@pytest.fixture(scope="module")
@starts_processes
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of all trainings of the zoo: one process, whose copies train."""
    out = tmp_path_factory.mktemp("zoo")
    done = subprocess.run([sys.executable, ZOO, out], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert "cannot record" not in done.stderr
    return out


def compared(traces: Path, a: str, b: str) -> Comparison:
    result = comparing.compare(reading.read(traces / a), reading.read(traces / b))
    result.sentences = causes.explain(result)
    return result


@pytest.mark.parametrize(
    "pair",
    [
        "plain again",
        "plain foreach",
        "plain one-by-one",
        "plain held",
        "plain recomputed",
        "plain recomputed-reentrant",
        "plain scaled",
        "adam resumed",
        "plain whole-batch-on-each",
    ],
)
def test_trainings_of_the_same_bits_are_called_so(traces: Path, pair: str) -> None:
    assert compared(traces, *pair.split()).verdict == "same bits"


@pytest.mark.parametrize(
    "pair",
    [
        "plain two",
        "plain halves",
        "plain two-halves",
        "two halves",
        "plain split",
        "two split",
        "adam adam-two",
        "adam adam-split",
        "adam-two adam-split",
    ],
)
def test_other_ranks_passes_and_splits_of_the_same_training_are_rounding(traces: Path, pair: str) -> None:
    result = compared(traces, *pair.split())
    assert result.verdict == "same up to rounding"
    assert max(result.curves[comparing.WEIGHTS]) < 1e-4


def test_autocast_within_the_model_is_told(traces: Path) -> None:
    result = compared(traces, "plain", "autocast")
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (comparing.LOSS, 1)
    assert len(result.sentences) == 1
    assert result.sentences[0].startswith("A computes in float32, B in float32, autocast to bfloat16")
    assert any("B in float32, autocast to bfloat16" in remark for remark in result.remarks)


CLEAN = [
    ("plain", "four quarters four-split reversed kept-zeros threads fused"),
    ("two", "four four-split held-two views small-buckets scaled-two"),
    ("halves", "quarters four"),
    ("unclipped", "unclipped-two unclipped-halves"),
    ("nesterov", "nesterov-two nesterov-split"),
    ("another-rule", "rmsprop-two rmsprop-quarters"),
    ("adam", "adam-again adam-four adam-halves adam-fused adam-foreach adam-two-halves"),
    ("norm", "norm-again"),
    ("drop", "drop-again"),
    ("tied", "tied-two"),
    ("untied", "untied-halves"),
    ("curved", "curved-halves"),
    ("carried", "carried-two"),
]


@pytest.mark.parametrize(("a", "b"), [(a, b) for a, others in CLEAN for b in others.split()])
def test_trainings_that_differ_in_execution_alone_raise_no_alarm(traces: Path, a: str, b: str) -> None:
    result = compared(traces, a, b)
    assert result.parting is None, result.sentences
    assert max(result.curves[comparing.WEIGHTS]) < 1e-4


MISTAKES = [
    ("halves", "undivided", comparing.LOSS, 1, "not divided by the 2 micro batches"),
    ("two-halves", "no-sync", comparing.GRADIENT, 1, "not exchanged"),
    ("two", "same-shard", comparing.SAMPLES, 1, "all ranks of B read the same samples"),
    ("two", "set-epoch", comparing.SAMPLES, 9, "set_epoch"),
    ("plain", "clipped", comparing.GRADIENT, 1, "A clips to a norm of 0.5, B to 0.25"),
    ("plain", "unclipped", comparing.GRADIENT, 1, "A clips the gradient to a norm of 0.5"),
    ("unclipped", "plain", comparing.GRADIENT, 1, "B clips the gradient to a norm of 0.5"),
    ("two", "clip-before-exchange", comparing.GRADIENT, 1, "clipped before the exchange"),
    ("two", "rate-scaled", comparing.SETTINGS, 1, "lr 0.1 and 0.2"),
    ("plain", "rate-scaled", comparing.SETTINGS, 1, "scaled with the ranks"),
    ("norm", "batch-norm-of-a-rank", comparing.LOSS, 1, "from 8 samples in A and 4 in B"),
    ("drop", "same-dropout", comparing.LOSS, 1, "all ranks of B draw the same random numbers"),
    (
        "adam",
        "decay-on-biases",
        comparing.SETTINGS,
        1,
        "weight decay of biases and norms differs: 0.bias, 2.bias, 4.bias",
    ),
    ("plain", "average-stays", comparing.LOSS, 7, "something else than the optimizer has written to the weights of B"),
    ("two", "average-stays", comparing.LOSS, 7, "something else than the optimizer has written to the weights of B"),
    ("adam", "resumed-without-moments", differences.MOMENTS, 7, "has counted 6 steps before this one, that of B 0"),
    ("norm", "eval-mode", comparing.LOSS, 5, "7 modules of B are in evaluation mode, 0 of the other"),
    ("last-batch-kept", "last-batch-dropped", comparing.SAMPLES, 8, "drop_last"),
    ("plain", "frozen", comparing.GRADIENT, 1, "one side alone has a gradient of 0.weight"),
    ("norm", "norm-momentum", differences.BUFFERS, 1, "running means of B are 0.1 times those of A"),
    ("plain", "nesterov", comparing.SETTINGS, 1, "nesterov False and True"),
    ("adam", "epsilon", comparing.SETTINGS, 1, "eps 1e-08 and 0.001"),
    ("two", "averaged-twice", comparing.GRADIENT, 1, "averaged twice"),
    ("two", "summed", comparing.CLIP, 1, "summed over ranks"),
    ("two", "loss-times-ranks", comparing.LOSS, 1, "multiplied by their number"),
    ("two", "labels-of-a-rank", comparing.TARGETS, 1, "rank 1 of B has other labels"),
    ("plain", "labels-against-samples", comparing.TARGETS, 1, "shifted against their samples"),
    ("plain", "smoothing", comparing.LOSS, 1, "label smoothing"),
    ("plain", "head-without-bias", comparing.START, 0, "B does not train 4.bias"),
    ("plain", "zero-grad", comparing.GRADIENT, 2, "zero_grad"),
    ("plain", "seed", comparing.START, 0, "another seed"),
    ("plain", "normalisation", comparing.SAMPLES, 1, "prepared otherwise"),
    ("plain", "batch-skipped", comparing.SAMPLES, 6, "1 update(s) ahead"),
    ("plain", "batch-per-rank", comparing.SAMPLES, 1, "the batch size is per rank"),
    ("two", "rate-of-one-rank", comparing.SETTINGS, 7, "rank 1 of B has other settings than rank 0"),
    ("plain", "schedule", comparing.SETTINGS, 7, "the schedules differ"),
    (
        "curved-halves",
        "curved-per-pass",
        comparing.SETTINGS,
        2,
        "of B is stepped 2 times for each update of the optimizer, once for",
    ),
    ("curved-per-pass", "curved", comparing.SETTINGS, 2, "the schedule of A is stepped 2 times for each update"),
    ("curved", "curved-per-epoch", comparing.SETTINGS, 2, "the schedule of B is stepped once in 4 updates"),
    ("curved", "curved-early", comparing.SETTINGS, 1, "the schedule of B is 1 step(s) ahead of the other one"),
    ("adam-curved", "resumed-curved-anew", comparing.SETTINGS, 7, "the schedule of B begins anew at the resume"),
    (
        "adam",
        "resumed-data-anew",
        comparing.SAMPLES,
        7,
        "B reads again at its resume, after update 6, what A read in update 1",
    ),
    ("resumed-data-anew", "adam", comparing.SAMPLES, 1, "A reads again at its resume"),
    ("plain", "read-twice", comparing.SAMPLES, 2, "each worker of its DataLoader reads the whole stream"),
    ("plain", "step-twice", comparing.LOSS, 7, "the optimizer of B steps here without a backward pass"),
    ("plain", "one-more-counted", comparing.LOSS, 1, "0.888889 times that of A (8/9), and so is its gradient"),
    ("carried", "not-carried", comparing.LOSS, 2, "layers of B begin this update with a hidden state of zeros"),
    ("not-carried", "carried-two", comparing.LOSS, 2, "layers of A begin this update with a hidden state of zeros"),
    ("cell-carried", "cell-reset", comparing.LOSS, 5, "layers of B begin this update with a hidden state of zeros"),
    ("pairs", "pairs-of-a-rank", comparing.TARGETS, 1, "positions among the samples of one rank"),
    ("plain", "scaler-skips", comparing.SKIPPED, 3, "B has skipped this update, A has made it"),
    ("untied", "tied", comparing.START, 0, "tied weights"),
    (
        "padded",
        "padding-counted",
        comparing.LOSS,
        1,
        "0.875 times that of A (7/8), and so is its gradient: the same sum is divided by another number (of labels, where padding",
    ),
    ("few-labels", "few-labels-halves", comparing.LOSS, 1, "a mean of means"),
    ("few-labels", "few-labels-two", comparing.LOSS, 1, "a mean of means"),
    ("few-labels-two", "few-labels", comparing.LOSS, 1, "a mean of means"),
    ("last-batch-kept", "filled-up", comparing.SAMPLES, 8, "B fills the last, incomplete batch up"),
    ("last-batch-kept", "short-window", comparing.LOSS, 8, "has 2 micro batches where the others have 4"),
    ("plain", "last-alone", comparing.GRADIENT, 1, "only the last one counts"),
    ("large-epsilon", "epsilon-inside", comparing.WEIGHTS, 1, "the rules differ: A steps by AdamW, B by AdamInside"),
    ("plain", "another-rule", differences.MOMENTS, 1, "A steps by SGD, B by RMSprop"),
]


@pytest.mark.parametrize(("a", "b", "what", "update", "cause"), MISTAKES, ids=[f"{a}-{b}" for a, b, *_ in MISTAKES])
def test_the_first_thing_that_parts_is_named_with_its_cause(
    traces: Path, a: str, b: str, what: str, update: int, cause: str
) -> None:
    result = compared(traces, a, b)
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (what, update)
    assert cause in result.sentences[0] or cause in result.sentences[-1]


def test_bits_are_counted_up_to_the_mistake(traces: Path) -> None:
    assert compared(traces, "plain", "schedule").bits_until == 6
    assert compared(traces, "plain", "batch-skipped").bits_until == 5


def test_a_training_that_goes_on_is_compared_from_there(traces: Path) -> None:
    result = compared(traces, "adam", "resumed")
    assert result.updates == 6
    assert "after update 6" in result.remarks[-1]


def test_other_weights_at_the_end_of_split_arrays_are_seen(traces: Path) -> None:
    whole, split = reading.read(traces / "plain"), reading.read(traces / "split")
    assert whole.start == pytest.approx(split.start, abs=0) or {
        name: row.digest for name, row in whole.start.items()
    } == {name: row.digest for name, row in split.start.items()}
    assert split.ranks == 2
    assert split.optimizer_facts["sharded"]
