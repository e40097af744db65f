"""A script of Paddle is recorded without a change of it, and trains as if it were not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import comparing, reading

pytestmark = pytest.mark.job

SCRIPT = """
import os, sys
import numpy as np
import paddle
from paddle import nn
from paddle.io import DataLoader, Dataset, DistributedBatchSampler

if "PADDLE_TRAINER_ID" in os.environ:
    from paddle.distributed import fleet
    fleet.init(is_collective=True)
paddle.seed(0)

class Numbers(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, place):
        return np.sin(np.arange(4) + place).astype("float32"), np.int64(place % 3)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = paddle.optimizer.Adam(0.05, parameters=model.parameters())
net, ranks = model, 1
if "PADDLE_TRAINER_ID" in os.environ:
    net, optimizer, ranks = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer), 2
sampler = DistributedBatchSampler(Numbers(), batch_size=4 // ranks)
for epoch in range(2):
    for images, labels in DataLoader(Numbers(), batch_sampler=sampler, num_workers=int(os.environ.get("WORKERS", 0))):
        loss = nn.CrossEntropyLoss()(net(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    with paddle.no_grad():
        model(images)
print(repr([float(p.sum()) for p in model.parameters()]), float(loss))
"""
HIGH_LEVEL = """
import numpy as np
import paddle

paddle.seed(0)
images, labels = np.sin(np.arange(96)).reshape(24, 4).astype("float32"), np.arange(24).reshape(24, 1) % 3
data = paddle.io.TensorDataset([paddle.to_tensor(images), paddle.to_tensor(labels)])
model = paddle.Model(paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 3)))
model.prepare(paddle.optimizer.Adam(0.05, parameters=model.parameters()), paddle.nn.CrossEntropyLoss())
model.fit(data, eval_data=data, batch_size=4, epochs=2, shuffle=False, verbose=0)
"""


def run(folder: Path, script: str, *words: str, out: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    front = [sys.executable, "-m", "mtrain_trace", "run", "--out", str(folder / out), "--"] if out else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [*front, *(words or (sys.executable, "train.py"))]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_a_script_trains_to_the_same_bits_and_leaves_one_trace(tmp_path: Path) -> None:
    plain, traced = run(tmp_path, SCRIPT, out=None), run(tmp_path, SCRIPT, out="t", WORKERS="1")
    assert traced.returncode == plain.returncode == 0, traced.stderr
    assert traced.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    assert len(list((tmp_path / "t").iterdir())) == 1  # none of the worker of the data loader
    trace = reading.read(tmp_path / "t")
    assert len(trace.updates) == 12
    assert [sum(update.samples.values()) for update in trace.updates] == [4] * 12  # the evaluation shows none
    assert [sum(update.targets.values()) for update in trace.updates] == [4] * 12
    assert trace.updates[-1].loss == pytest.approx(float(plain.stdout.split()[-1]), rel=1e-6)
    assert [update.steps for update in trace.updates] == [None, *range(1, 12)]
    assert set(trace.start) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "12 updates of 1 process in" in traced.stderr


def test_paddles_own_loop_is_recorded(tmp_path: Path) -> None:
    done = run(tmp_path, HIGH_LEVEL, out="t")
    assert done.returncode == 0, done.stderr
    assert "cannot record" not in done.stderr
    trace = reading.read(tmp_path / "t")
    assert [sum(update.samples.values()) for update in trace.updates] == [4] * 12
    assert [sum(update.targets.values()) for update in trace.updates] == [4] * 12


@pytest.mark.slow
def test_fleets_launcher_leaves_no_trace_and_each_rank_one(tmp_path: Path) -> None:
    words = (
        sys.executable,
        "-m",
        "paddle.distributed.launch",
        "--nproc_per_node",
        "2",
        "--log_dir",
        "logs",
        "train.py",
    )
    one = run(tmp_path, SCRIPT, out="one")
    two = run(tmp_path, SCRIPT, *words, out="two", PADDLE_DISTRI_BACKEND="gloo")
    assert one.returncode == two.returncode == 0, two.stderr
    assert sorted(path.name.split("-")[1] for path in (tmp_path / "two").iterdir()) == ["00000", "00001"]
    result = comparing.compare(reading.read(tmp_path / "one"), reading.read(tmp_path / "two"))
    assert result.verdict == "same up to rounding", result.parting
    assert result.updates == 12
