"""However a rank is started, it is recorded: as a process or a copy, by each launcher, with torch imported ahead or not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.system import environment
from mtrain_trace import reading, recorder, startup

pytestmark = pytest.mark.job

# Without the word `environ`, mtrain imports torch before the script; with it, the script does.
SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = torch.randn(8, 4), torch.randint(0, 3, (8,))
for update in range(3):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
"""
PADDLE = """
import paddle
paddle.seed(0)
model = paddle.nn.Linear(4, 3)
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
images, labels = paddle.randn([8, 4]), paddle.randint(0, 3, [8])
for update in range(3):
    paddle.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.clear_grad()
"""


@pytest.mark.parametrize(
    ("backend", "launcher", "ranks", "last"),
    [
        ("solo", "local", 1, ""),
        ("solo", "local", 1, "# environ"),
        ("ddp", "torchrun", 2, ""),
        ("ddp", "torchrun", 2, "# environ"),
        ("horovod", "horovodrun", 2, ""),
        pytest.param("deepspeed", "deepspeed", 2, "", marks=pytest.mark.slow),
        pytest.param("fleet", "fleetrun", 2, PADDLE, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_mtrain_run_are_recorded(tmp_path: Path, backend: str, launcher: str, ranks: int, last: str) -> None:
    (tmp_path / "train.py").write_text(last if backend == "fleet" else SCRIPT + last)
    command = [sys.executable, "-m", "mtrain_trace", "run", "--out", "t", "--"]
    command += [sys.executable, "-m", "mtrain", "run", "--backend", backend, "--launcher", launcher]
    command += ["--nproc-per-node", str(ranks), "-o", "cluster.threads=1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    trace = reading.read(tmp_path / "t")
    assert sorted(process["rank"] for process in trace.processes) == list(range(ranks))
    assert len({process["pid"] for process in trace.processes}) == ranks
    assert [len(update.losses) for update in trace.updates] == [ranks] * 3


@pytest.mark.parametrize("begun", [False, True])
def test_a_copied_process_has_its_own_trace_unless_it_is_copied_from_one_that_trains(
    tmp_path: Path, *, begun: bool
) -> None:
    program = f"""
import multiprocessing, os, sys
from mtrain_trace.recorder import Recorder
out = Recorder({str(tmp_path / "t")!r})
def train():
    out.before_close(lambda: out.write("updates.jsonl", {{"last": os.getpid()}}))
    out.describe({{"pid": os.getpid()}})
    out.write("updates.jsonl", {{"pid": os.getpid()}})
if {begun}:
    train()
copy = multiprocessing.get_context("fork").Process(target=train)
copy.start()
copy.join()
print([os.getpid(), copy.pid])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    parent, copy = ast.literal_eval(done.stdout)
    folders = list((tmp_path / "t").iterdir())
    assert [folder.name.split("-")[-1] for folder in folders] == [str(parent if begun else copy)]
    lines = (folders[0] / recorder.UPDATES).read_text().splitlines()
    assert f'"pid": {parent if begun else copy}' in (folders[0] / recorder.PROCESS).read_text()
    assert len(lines) == 2  # the one that was held back too, although such a copy ends without atexit


def test_ranks_on_other_hosts_get_the_variables_of_the_recorder() -> None:
    names = [startup.VARIABLE, recorder.EVERY_VARIABLE, recorder.AT_VARIABLE, recorder.UPDATES_VARIABLE]
    sent = environment.forward(dict.fromkeys((*names, "MTRAIN_JOB_SECRET"), "1"))
    assert sorted(sent) == sorted(names)
