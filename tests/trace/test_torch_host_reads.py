"""Recording waits for no device: the values of an update are read while the next one is under way."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.job

PROGRAM = """
import sys, torch, mtrain_trace
from mtrain_trace import torch_mixing
from torch.utils._python_dispatch import TorchDispatchMode

class Reads(TorchDispatchMode):  # `item`, `if tensor`, `float(tensor)`: each makes the host wait for the device
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), f"{function} in update {now}"
        return function(*args, **(kwargs or {}))

now, early = 0, []
begin, read = torch_mixing.Late.__init__, torch_mixing.Late.read
def begun(self, tensor):
    begin(self, tensor)
    self.update = now
def noted(self):
    if self.update >= now:
        early.append((self.update, now))
    return read(self)
torch_mixing.Late.__init__, torch_mixing.Late.read = begun, noted
torch.set_num_threads(1)
recorder = mtrain_trace.attach(sys.argv[1])
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
images, labels = torch.randn(8, 4), torch.randint(0, 3, (8,))
for now in range(1, 10):
    with Reads():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
now = 10
recorder.close()
print(early)
"""


def test_the_values_of_an_update_are_read_at_the_next_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, tmp_path / "t"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot record" not in done.stderr
    lines = (next((tmp_path / "t").glob("rank-*")) / "updates.jsonl").read_text().splitlines()
    assert len(lines) == 9
    # The start weights alone are read at once, before the first step.
    assert set(eval(done.stdout)) <= {(1, 1)}
