"""What a leader says, does and leaves on hosts that are two addresses of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOSTS = ["--launcher", "ssh", "--ips", "127.0.0.1,127.0.0.2"]
SPEC = """
_BASE_: digits
model: {options: {autoanchor: false}}
data: {root: data, format: coco, image_size: 64}
train: {batch_size: 4}
"""


def mtrain(here: Path, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mtrain", *words],
        cwd=here,
        env={**os.environ, "HOME": str(here), "MTRAIN_CLUSTER_SECRET": "open sesame", **more},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def here(tmp_path):
    (tmp_path / "mtrain.yml").write_text(SPEC)
    return tmp_path


def test_what_is_in_the_way_is_told_once_and_nothing_is_started(here):
    done = mtrain(here, "train", "--backend", "ddp", *HOSTS)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert said.count("No such file or directory") == 2, said  # on each of two hosts
    assert "the job was not started: 2 things to mend, marked bad above" in said
    assert not (here / "runs").exists()


def test_a_resumed_run_is_called_by_its_name(here):
    run = here / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "spec.yml").write_text(SPEC)
    for given in (run, run / "checkpoints" / "step-00000002"):
        done = mtrain(here, "train", "--backend", "ddp", *HOSTS, "--resume", str(given))
        assert "mine: yolov5n on ddp" in done.stdout + done.stderr
        assert done.returncode == 2


@pytest.mark.slow
def test_doctor_leaves_nothing_of_what_went_well(here):
    (here / "mtrain.yml").unlink()
    done = mtrain(here, "doctor", "-b", "ddp", *HOSTS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all-reduce" in done.stdout
    assert list((here / ".cache" / "mtrain" / "doctor").iterdir()) == []
