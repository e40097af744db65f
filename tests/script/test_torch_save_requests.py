"""SIGUSR1 asks a user's script to save and to go on, under `mtrain run` and under plain Python."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.script.runs import QUIET, SCRIPTS

pytestmark = pytest.mark.job

SCRIPT = """
import sys
import time

sys.path.insert(0, {folder!r})
import torch
from points import Plain

import mtrain

if __name__ == "__main__":
    with mtrain.session() as session:
        model, optimizer = session.prepare(lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1))
        for inputs, targets in session.batches(Plain(64, 0), global_batch=8, updates=40, workers=1):
            optimizer.update(torch.nn.functional.cross_entropy(model(inputs), targets))
            time.sleep(0.05)
"""
STARTS = {
    "plain Python": [sys.executable],
    "mtrain run": [
        *(sys.executable, "-m", "mtrain", "run", *QUIET, "-o", "checkpoint.every_epochs=null"),
        *("--backend", "ddp", "--nproc-per-node", "2", "--name", "script"),
    ],
}


def records(folder, kind):
    path = folder / "runs" / "script" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize("start", ["plain Python", pytest.param("mtrain run", marks=pytest.mark.slow)])
def test_sigusr1_to_every_process_of_a_script_saves_and_it_goes_on(tmp_path, start):
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(SCRIPTS)))
    with subprocess.Popen(
        [*STARTS[start], "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 120
        while len(records(tmp_path, "update")) < 3:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        mine = psutil.Process(process.pid)
        workers = mine.children(recursive=True)
        assert len(workers) >= 2, "a server of processes and a worker at least"
        for each in [mine, *workers]:
            each.send_signal(signal.SIGUSR1)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    saved = [(row["update"], row["why"]) for row in records(tmp_path, "checkpoint")]
    assert [why for _, why in saved].count("requested") == 1
    update = next(update for update, why in saved if why == "requested")
    assert 3 < update < 40
    assert f"saved at update {update}, as SIGUSR1 asked; training goes on" in output
    assert len(records(tmp_path, "update")) == 40
