"""What a plan says of the bytes that a rank sends, beside what the kernel counts on the rank's connections while it trains."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from mtrain.jobs.plan.sent_bytes import sent_bytes
from mtrain.spec import config
from mtrain.weights.outline import SpecOutline

pytestmark = pytest.mark.job

WIDE = "model.options={patch: 2, width: 256, depth: 2, heads: 4}"
"""A model of 1.6 M parameters, most of them in arrays that stage 3 of ZeRO does not keep whole."""
UPDATES = 5


def _trained(folder: Path, backend: str, *values: str, ranks: int) -> float:
    """Train for a few updates; return the bytes that rank 0 sent in one, by the kernel's count for its TCP connections."""
    command = [
        *(sys.executable, "-m", "mtrain", "train", "-c", "vit_digits", "--backend", backend, "--name", "sent"),
        *("--nproc-per-node", str(ranks), "--devices", "cpu", "-o", WIDE, "train.epochs=null", f"train.updates={UPDATES}"),
        *("schedule.warmup=null", "train.batch_size=8", "evaluate.enabled=false", "report.plots=false", "data.workers=1"),
        *("report.tensorboard=false", "report.trace=traffic", *values),
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    records = map(json.loads, (folder / "runs" / "sent" / "metrics.jsonl").read_text().splitlines())
    totals = [record["sent_bytes"] for record in records if "sent_bytes" in record]
    assert len(totals) == UPDATES
    return median(after - before for before, after in pairwise(totals))


@pytest.mark.parametrize(
    ("backend", "values", "ranks"),
    [
        ("ddp", (), 2),
        ("fsdp", (), 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("ddp", (), 4),
                ("fsdp", ("train.accumulate=2",), 4),
                ("fleet", (), 2),
                ("horovod", (), 2),
                ("horovod", ("backend.options.compression=fp16",), 4),
                ("deepspeed", ("backend.options.stage=0",), 2),
                ("deepspeed", ("backend.options.stage=1",), 2),
                ("deepspeed", ("backend.options.stage=1", "backend.options.bucket_mb=1"), 4),
                ("deepspeed", ("backend.options.stage=2", "train.freeze=[embedding]"), 2),
                (
                    "deepspeed",
                    ("backend.options.stage=2", "backend.options.reduction=micro_batch", "train.accumulate=2"),
                    2,
                ),
                ("deepspeed", ("backend.options.stage=3",), 2),
                ("deepspeed", ("backend.options.stage=3", "train.accumulate=2", "train.precision=fp64"), 4),
            ]
        ),
    ],
)
def test_a_rank_sends_what_the_plan_says(backend, values, ranks, tmp_path):
    counted = _trained(tmp_path, backend, *values, ranks=ranks)
    loaded = config.load(str(tmp_path / "runs" / "sent" / "spec.yml"))
    outline = SpecOutline(loaded.spec, classes=10)
    planned = sent_bytes(loaded, outline.state, size=ranks, on_cpu=True)
    assert planned is not None
    print(
        f"{backend} {values} on {ranks} ranks: planned {planned:,.0f}, counted {counted:,.0f}, {counted / planned:.5f}"
    )
    # Besides, ranks agree on a few numbers after an update, and Horovod asks every millisecond whose gradients are ready.
    assert 1 <= counted / planned < (1.03 if backend == "horovod" else 1.005)
