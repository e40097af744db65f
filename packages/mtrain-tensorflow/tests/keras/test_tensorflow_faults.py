"""`mtrain compare --ranks 1,2` names faults that are planted in Horovod's examples with Keras and a GradientTape."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.keras.jobs import PYTHON, environment, needs_tensorflow

pytestmark = [needs_tensorflow, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("faulty.py")
NAMED = {
    "no_broadcast": "begin with other weights than rank 0: they are not broadcast",
    "rate_not_scaled": "it is 0.001 in both, not scaled",
    "tape_not_wrapped": "they are not exchanged",
    "averaged_twice": "averaged twice, or divided by the ranks besides",
    "steps_not_divided": "the steps of an epoch are not divided by the number of ranks",
    "saved_on_all": "2 ranks write saved-1",
    "same_dropout": "all ranks draw the same random numbers",
    "metric_not_averaged": "they are not averaged over the ranks (hvd.callbacks.MetricAverageCallback)",
}


def compared(here, fault):
    line = [sys.executable, "-m", "mtrain", "compare", "--script", str(SCRIPT), "--ranks", "1,2", "--out", "compared"]
    options = ["-o", f"backend.python={PYTHON}", "-o", "cluster.threads=1", "--", fault]
    return subprocess.run(
        [*line, *options], cwd=here, env=environment(), capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("fault", ["none", "tape"])
def test_without_a_fault_the_ranks_train_alike(fault, tmp_path):
    result = compared(tmp_path, fault)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SAME UP TO ROUNDING over 15 updates" in result.stdout
    assert "RANKS OF B" not in result.stdout


@pytest.mark.parametrize("fault", NAMED)
def test_a_planted_fault_is_named(fault, tmp_path):
    result = compared(tmp_path, fault)
    assert result.returncode == 1, result.stdout + result.stderr
    told = result.stdout.lower()
    assert NAMED[fault].lower() in told, result.stdout
    others = {words for name, words in NAMED.items() if name != fault and words.lower() in told}
    assert others == set()
