"""A script's job that goes on is the job that was interrupted: what its user had typed is taken from the run."""

import os
import signal
import subprocess
import sys

import pytest
import yaml

from tests.script.runs import QUIET, done, run, summary
from tests.script.test_torch_script_jobs import newest_rank, wait_for
from tests.starts import starts_processes

SCRIPT = """
import sys, time
import torch
import mtrain

torch.manual_seed(0)
inputs = torch.randn(96, 6)
samples = [(x, x.sum().reshape(1)) for x in inputs]
with mtrain.session() as session:
    model, optimizer = session.prepare(lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(.3), torch.nn.Linear(8, 1)))
    for x, y in session.batches(samples, global_batch=12, epochs=3):
        time.sleep(float(sys.argv[1]) if sys.argv[1:] else 0)
        optimizer.update(((model(x) - y) ** 2).mean())
"""
TYPED = (
    "--backend", "solo", "--seed", "42", "-o", "train.accumulate=2", "-o", "train.clip_norm=0.5",
    "-o", "optimizer.learning_rate=0.05", "-o", "checkpoint.every_updates=4",
)  # fmt: skip


@pytest.fixture(scope="module")
@starts_processes
def killed(tmp_path_factory):
    """Return a folder with an undisturbed run, and one whose rank was killed after its eighth update."""
    here = tmp_path_factory.mktemp("killed")
    (here / "r.py").write_text(SCRIPT)
    done(here, "--name", "whole", *TYPED, "r.py")
    line = [sys.executable, "-m", "mtrain", "run", *QUIET, "--name", "rk", *TYPED, "r.py", "0.2"]
    job = subprocess.Popen(line, cwd=here, stdout=subprocess.DEVNULL)
    wait_for(here / "runs/rk/checkpoints/step-00000008/MANIFEST.json")
    os.kill(newest_rank(job.pid), signal.SIGKILL)
    assert job.wait(60) == 1
    return here


def test_a_killed_script_goes_on_with_the_choices_of_its_run_to_the_same_bits(killed):
    before = yaml.safe_load((killed / "runs/rk/spec.yml").read_text())
    result = run(killed, "--resume", "runs/rk", "r.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert summary(killed, "rk")["weights_sha256"] == summary(killed, "whole")["weights_sha256"]
    now = yaml.safe_load((killed / "runs/rk/spec.yml").read_text())
    assert now["backend"] == before["backend"]
    assert now["train"] == before["train"]
    assert now["optimizer"] == before["optimizer"]
    assert "arguments of the script" in result.stdout  # it was started with one more


def test_what_is_typed_on_top_of_a_run_is_told_and_a_changed_script_too(killed):
    (killed / "other.py").write_text(SCRIPT + "\n")
    result = run(killed, "--dry-run", "--resume", "runs/rk", "--seed", "7", "-o", "train.clip_norm=0.1", "other.py")
    assert result.returncode == 0, result.stderr
    assert "train.seed 42 there, 7 here (--seed 7)" in result.stderr
    assert "train.clip_norm 0.5 there, 0.1 here" in result.stderr
    assert "another script than that of the run" in result.stderr
    assert "backend.name" not in result.stderr


@pytest.mark.parametrize("resume", ["if-any", "auto"])
def test_a_run_that_is_found_by_its_name_keeps_its_choices_too(killed, resume):
    result = run(killed, "--dry-run", "--name", "rk", f"--resume={resume}", "r.py")
    assert result.returncode == 0, result.stderr
    assert "solo, started by" in result.stdout
    assert "resumes from" in result.stdout
