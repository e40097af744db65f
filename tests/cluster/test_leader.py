"""Messages, actions and files of a leader whose hosts are two addresses of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint.store import Checkpoints
from mtrain.core.interfaces import Progress, State
from mtrain.errors import CheckpointError
from mtrain.jobs.preflight import job_checks
from mtrain.spec import config
from tests.ports import held_port

HOSTS = ["--cluster", "ssh", "--ips", "127.0.0.1,127.0.0.2"]
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


@pytest.mark.job
def test_an_obstacle_is_reported_once_and_nothing_is_started(here):
    process = mtrain(here, "train", "--backend", "ddp", *HOSTS)
    message = process.stdout + process.stderr
    assert process.returncode == 2, message
    assert message.count("No such file or directory") == 2, message  # on each of two hosts
    assert "the job was not started: 2 things to mend, marked bad above" in message
    assert not (here / "runs").exists()


BY_HAND = ["--ips", "127.0.0.1,127.0.0.2", "--failure-timeout-s", "4", "--nproc-per-node", "1"]


@pytest.mark.job
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--node-rank", "1"], "--node-rank 1: no host is named"),
        (
            [*BY_HAND, "--node-rank", "1", "--control-port", "31999", "--master-port", "31999"],
            "--control-port 31999: the ranks are to meet at cluster.master_port 31999 as well",
        ),
    ],
    ids=["none of none", "one port for two"],
)
def test_what_hosts_cannot_be_started_by_hand_with_is_refused(here, typed, message):
    process = mtrain(here, "train", "--backend", "ddp", *typed)
    assert process.returncode == 2
    assert message in process.stderr.splitlines()[-1]


@pytest.mark.job
@pytest.mark.parametrize(
    "checkpoint_arguments", [[], ["-c", "mtrain.yml", "--run", "runs/mine"]], ids=["newest", "named"]
)
def test_a_host_that_serves_another_needs_no_checkpoint_of_its_own(here, checkpoint_arguments):
    port = str(held_port())
    process = mtrain(
        here,
        "evaluate",
        "--backend",
        "ddp",
        *BY_HAND,
        "--node-rank",
        "1",
        "--control-port",
        port,
        *checkpoint_arguments,
    )
    assert process.returncode == 1, process.stderr
    assert f"the first host, 127.0.0.1, has not answered at port {port}" in process.stderr


def test_a_checkpoint_that_the_host_of_rank_0_has_not_is_told_before_anything_is_started(tmp_path):
    with pytest.raises(CheckpointError, match=r"step-00000002: no checkpoint on .*, where rank 0 is; copy it there"):
        job_checks.check(config.load("digits").job, size=1, training=False, resumed=tmp_path / "step-00000002")


@pytest.mark.job
def test_a_resumed_run_is_called_by_its_name(here):
    run = here / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "spec.yml").write_text(SPEC)
    for given in (run, run / "checkpoints" / "step-00000002"):
        process = mtrain(here, "train", "--backend", "ddp", *HOSTS, "--resume", str(given))
        assert "mine: yolov5n on ddp" in process.stdout + process.stderr
        assert process.returncode == 2


def damaged_run(here: Path, *, intact: bool) -> Path:
    """A run whose newest checkpoint is damaged, with or without an older one that is not."""
    run = here / "runs" / "mine"
    store = Checkpoints(run / "checkpoints", keep_last=2, keep_best=0, asynchronous=False)
    for update in (1, 2) if intact else (2,):
        state = State(weights={"w": np.zeros(64, dtype=np.float32)})
        store.save(state, Progress(update=update), score=None, spec={}, extra={})
    (run / "checkpoints" / "step-00000002" / "weights.safetensors").write_bytes(b"cut")
    (run / "spec.yml").write_text(SPEC)
    return run


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize("intact", [True, False])
def test_a_damaged_newest_checkpoint_is_named_on_several_hosts_too(here, intact):
    run = damaged_run(here, intact=intact)
    process = mtrain(here, "train", "--backend", "ddp", *HOSTS, "--resume", str(run))
    told = process.stdout + process.stderr
    assert "step-00000002 is damaged" in told, told
    assert ("no intact checkpoint" in told) == (not intact)


@pytest.mark.slow
def test_doctor_leaves_nothing_of_what_went_well(here):
    (here / "mtrain.yml").unlink()
    process = mtrain(here, "doctor", "-b", "ddp", *HOSTS)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "all-reduce" in process.stdout
    assert list((here / ".cache" / "mtrain" / "doctor").iterdir()) == []
