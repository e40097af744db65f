"""An unmodified script of transformers' Trainer, alone and on two ranks under DeepSpeed with micro batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import comparing, reading

SCRIPT = Path(__file__).parent / "trainer_script.py"
TWO = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
TWO += ["--nproc-per-node=2"]


def record(out: Path, *words: str) -> reading.Trace:
    front = [sys.executable, "-m", "mtrain_trace", "run", "--out", out, "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*front, *words, "--out", out.with_suffix(".run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cannot record" not in done.stderr
    return reading.read(out)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trainer_trains_the_same_on_two_ranks_of_zero_with_micro_batches(tmp_path: Path) -> None:
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    stage = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    (tmp_path / "zero.json").write_text(json.dumps({**auto, **stage}))
    alone = record(tmp_path / "alone", sys.executable, str(SCRIPT))
    zero = ["--deepspeed", str(tmp_path / "zero.json"), "--batch", "2", "--accumulate", "2"]
    both = record(tmp_path / "both", *TWO, str(SCRIPT), *zero)
    result = comparing.compare(alone, both)
    assert both.ranks == 2
    assert both.updates[0].micro_batches == 2
    assert result.verdict == "same up to rounding"
    assert alone.updates[0].samples == both.updates[0].samples
    assert max(result.curves[comparing.WEIGHTS]) < 1e-3
    assert max(result.curves[comparing.GRADIENT]) < 1e-5
