"""A job on one host imports torch in its ranks and nowhere else, and once where the ranks are copies of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.job

NOTING = """
import importlib.abc, json, os, sys

class Noting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":  # part of every import of torch; some ask only whether torch is there
            with open(os.environ["NOTED"], "a") as file:
                command = open("/proc/self/cmdline").read().split(chr(0))
                file.write(json.dumps({"pid": os.getpid(), "command": command}) + chr(10))

sys.meta_path.insert(0, Noting())
"""
SCRIPT = """
import sys{before}
import torch
import mtrain

with mtrain.session() as session:
    model, optimizer = session.prepare(lambda: torch.nn.Linear(2, 1), optimizer=mtrain.SGD(learning_rate=0.1))
    for x in session.batches(torch.ones(8, 2), global_batch=4, epochs=1):
        optimizer.update(model(x).mean())
    session.print("OMP", torch.get_num_threads())
"""


def imports(folder: Path, *words: str, before: str = "") -> list[dict]:
    """Run a job of two updates; return what each process was that has imported torch."""
    (folder / "noting").mkdir()
    (folder / "noting" / "sitecustomize.py").write_text(NOTING)
    (folder / "train.py").write_text(SCRIPT.format(before=before))
    path = os.pathsep.join([str(folder / "noting"), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "mtrain", "run", "-o", "report.plots=false", "report.tensorboard=false", *words]
    result = subprocess.run(
        [*command, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path, "NOTED": str(folder / "noted")},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in (folder / "noted").read_text().splitlines()]


@pytest.mark.parametrize("backend", ["solo", pytest.param("horovod", marks=pytest.mark.slow)])
def test_the_ranks_and_nothing_else_import_torch(tmp_path, backend):
    ranks = 1 if backend == "solo" else 2
    processes = imports(tmp_path, "--backend", backend, "--nproc-per-node", str(ranks))
    assert len({each["pid"] for each in processes}) == len(processes) == ranks
    assert all("mtrain.rank.worker" in each["command"] for each in processes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_run_a_script_on_one_host_import_torch_once_together(tmp_path, ranks):
    (process,) = imports(tmp_path, "--backend", "ddp", "--nproc-per-node", str(ranks))
    assert "mtrain.backends._torch.ranks.starter" in process["command"]


def test_ranks_import_torch_after_a_script_that_sets_variables(tmp_path):
    before = "\nimport os\nos.environ['SEEN'] = str('torch' in sys.modules)\nassert os.environ['SEEN'] == 'False'"
    processes = imports(tmp_path, "--backend", "ddp", "--nproc-per-node", "2", before=before)
    assert sum("mtrain.rank.worker" in each["command"][:4] for each in processes) == 2
