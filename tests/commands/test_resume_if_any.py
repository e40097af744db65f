"""`--resume if-any`: one command begins a job the first time, and continues the same run each further time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.jobs.hosts import allocation
from tests.script.runs import QUIET, SCRIPTS, done, run, summary
from tests.script.test_torch_script_jobs import newest_rank, wait_for

SCRIPT = str(SCRIPTS / "train_torch.py")
SOLO = ("--backend", "solo", "-o", "checkpoint.every_updates=4")


@pytest.mark.smoke
@pytest.mark.job
def test_the_same_command_begins_continues_and_finishes_a_run(tmp_path):
    done(tmp_path, "--name", "whole", *SOLO, SCRIPT)
    (tmp_path / "runs/job").mkdir()  # what a job leaves behind that died before its first checkpoint
    line = [sys.executable, "-m", "mtrain", "run", *QUIET, "--name", "job", "--resume", "if-any", *SOLO, SCRIPT]
    job = subprocess.Popen([*line, "--delay", "0.1"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "runs/job/checkpoints/step-00000008/MANIFEST.json")
    rank = newest_rank(job.pid)
    os.kill(rank, signal.SIGSTOP)  # the job must outlast the start of another one, however slow that is
    held = run(tmp_path, "--name", "job", "--resume", "if-any", *SOLO, SCRIPT)
    assert held.returncode == 2
    assert "is running a job in this folder" in held.stderr
    assert job.poll() is None
    os.kill(rank, signal.SIGKILL)
    assert job.wait(240) == 1
    assert "goes on from" in done(tmp_path, "--name", "job", "--resume", "if-any", *SOLO, SCRIPT).stdout
    assert summary(tmp_path, "job")["weights_sha256"] == summary(tmp_path, "whole")["weights_sha256"]
    done(tmp_path, "--name", "job", "--resume", "if-any", *SOLO, SCRIPT)  # it has ended, and stays as it is
    assert summary(tmp_path, "job")["weights_sha256"] == summary(tmp_path, "whole")["weights_sha256"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["job", "latest", "whole"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "77"}, "77"),
        ({"SLURM_JOB_ID": "81", "SLURM_ARRAY_JOB_ID": "80", "SLURM_ARRAY_TASK_ID": "0"}, "80_0"),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "0"}, "5"),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "3"}, "5_3"),
        ({"PBS_JOBID": "12[4].head.node"}, "12_4_"),
    ],
)
def test_a_schedulers_job_has_an_id_of_its_own(environ, expected):
    assert allocation.job_id(environ) == expected


@pytest.mark.job
def test_two_jobs_of_a_scheduler_do_not_continue_each_others_run(tmp_path):
    for number in ("7", "8"):
        line = [sys.executable, "-m", "mtrain", "run", *QUIET, *SOLO, "--resume", "if-any", "--dry-run", SCRIPT]
        environ = {**os.environ, "SLURM_JOB_ID": number}
        result = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
        assert f"runs/train_torch-{number}" in result.stdout


@pytest.mark.job
def test_several_hosts_begin_and_continue_together(tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    hosts = ["--name", "hosts", "--ips", "127.0.0.1,127.0.0.2", "--resume", "if-any"]
    for _ in range(2):
        line = [sys.executable, "-m", "mtrain", "run", *QUIET, *hosts, "--node-rank", "1", SCRIPT, "--epochs", "1"]
        other = subprocess.Popen(line, cwd=folders[1], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        done(folders[0], *hosts, "--node-rank", "0", SCRIPT, "--epochs", "1")
        assert other.wait(60) == 0
    runs = Path(folders[0] / "runs")
    assert sorted(path.name for path in runs.iterdir()) == ["hosts", "latest"]
    starts = [json.loads(line) for line in (runs / "hosts/metrics.jsonl").read_text().splitlines() if '"start"' in line]
    assert [start["update"] for start in starts if start["kind"] == "start"] == [0, 10]
