"""``cluster.shards`` for `mtrain run SCRIPT`: ranks compute several shards, evenly or not, and the job stays the same."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import held_port
from tests.script.runs import QUIET, SCRIPTS, done, largest_difference, run, summary, weights
from tests.script.test_torch_script_jobs import newest_rank, wait_for
from tests.starts import starts_processes

TORCH, STREAM = str(SCRIPTS / "train_torch.py"), str(SCRIPTS / "train_stream.py")
SHARDS = ("-o", "cluster.shards=3")
FP64 = ("--precision", "fp64", "--no-branches")
"""With dropout, whose random numbers belong to a shard, and without branches, which would depend on a rank's calls."""


def ranks(number: int) -> tuple[str, ...]:
    return ("--nproc-per-node", str(number))


def losses(here: Path, name: str) -> list[dict[str, float]]:
    """Return what the loop and the script have reported of each update."""
    records = map(json.loads, (here / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return [record["losses"] for record in records if record["kind"] == "update"]


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory) -> Path:
    """A folder with `three`, a job of three ranks without a number of shards, and `two`, of three shards on two ranks."""
    here = tmp_path_factory.mktemp("shards")
    done(here, "--name", "three", *ranks(3), TORCH, *FP64)
    done(here, "--name", "two", *ranks(2), *SHARDS, TORCH, *FP64)
    return here


def test_three_shards_on_three_ranks_are_the_bits_of_three_ranks(folder):
    done(folder, "--name", "same", *ranks(3), *SHARDS, TORCH, *FP64)
    assert summary(folder, "same")["weights_sha256"] == summary(folder, "three")["weights_sha256"]
    assert summary(folder, "same")["ema_sha256"] == summary(folder, "three")["ema_sha256"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_script_with_three_shards_trains_the_same_on_fewer_ranks(number, folder):
    name = {1: "one", 2: "two"}[number]
    if number == 1:
        done(folder, "--name", name, "--backend", "solo", *SHARDS, TORCH, *FP64)
    fewer, three = weights(folder, name), weights(folder, "three")
    # A shard of each micro batch of the job moves the buffers, not each pass of a rank.
    assert int(fewer["calls"]) == int(three["calls"]) == 60
    difference = largest_difference(fewer, three)
    print(f"3 shards on {number} ranks: largest difference to three ranks {difference:.1e}")
    assert difference <= 1e-12
    assert losses(folder, name) == [pytest.approx(each, rel=1e-11) for each in losses(folder, "three")]
    assert summary(folder, name)["best"]["accuracy"] == summary(folder, "three")["best"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [("horovod",), ("deepspeed", "-o", "backend.options.stage=1"), ("deepspeed", "-o", "backend.options.stage=3")],
    ids=["horovod", "zero1", "zero3"],
)
def test_every_backend_of_torch_computes_three_shards_on_two_ranks(backend, folder, tmp_path):
    done(tmp_path, "--name", "two", "--backend", *backend, *ranks(2), *SHARDS, TORCH, *FP64)
    difference = largest_difference(weights(tmp_path, "two"), weights(folder, "three"))
    print(f"3 shards on 2 ranks, {' '.join(backend)}: largest difference to three ranks {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.slow
def test_fleet_computes_three_shards_on_two_ranks(tmp_path):
    paddle = (str(SCRIPTS / "train_paddle.py"), "--precision", "fp64", "--dropout", "0")
    done(tmp_path, "--name", "three", "--backend", "fleet", *ranks(3), *paddle)
    done(tmp_path, "--name", "two", "--backend", "fleet", *ranks(2), *SHARDS, *paddle)
    difference = largest_difference(weights(tmp_path, "two"), weights(tmp_path, "three"))
    print(f"3 shards on 2 ranks, fleet: largest difference to three ranks {difference:.1e}")
    assert difference <= 1e-12


def test_without_shards_two_ranks_draw_other_random_numbers_than_three(folder):
    done(folder, "--name", "free", *ranks(2), TORCH, *FP64)
    assert largest_difference(weights(folder, "free"), weights(folder, "three")) > 1e-4


@pytest.mark.parametrize("start", [2, 3])
def test_a_killed_job_goes_on_with_two_ranks_for_three_shards(start, folder, tmp_path):
    line = [*ranks(start), *SHARDS, *QUIET, "-o", "checkpoint.every_updates=4", TORCH, *FP64, "--delay", "0.1"]
    command = [sys.executable, "-m", "mtrain", "run", "--name", "cut", *line]
    job = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "runs/cut/checkpoints/step-00000012/MANIFEST.json")  # the third update of the second epoch
    os.kill(newest_rank(job.pid), signal.SIGKILL)
    assert job.wait(60) == 1
    # The number of shards was chosen for the run, so nobody has to type it again.
    result = done(tmp_path, "--resume", "runs/cut", *ranks(2), TORCH, *FP64)
    assert "draw other numbers" not in result.stdout
    if start == 2:
        assert summary(tmp_path, "cut")["weights_sha256"] == summary(folder, "two")["weights_sha256"]
        assert summary(tmp_path, "cut")["ema_sha256"] == summary(folder, "two")["ema_sha256"]
    assert largest_difference(weights(tmp_path, "cut"), weights(folder, "three")) <= 1e-12


@pytest.mark.job
@pytest.mark.parametrize("kind", [pytest.param("items", marks=pytest.mark.slow), "whole"])
def test_a_stream_is_divided_into_shards_as_samples_by_number_are(kind, tmp_path):
    done(tmp_path, "--name", "three", *ranks(3), STREAM, "--kind", kind)
    done(tmp_path, "--name", "two", *ranks(2), *SHARDS, STREAM, "--kind", kind)
    assert largest_difference(weights(tmp_path, "two"), weights(tmp_path, "three")) <= 1e-12


def test_an_elastic_job_of_three_hosts_begins_with_two_of_them(folder, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    elastic = {
        "ips": "[127.0.0.1, 127.0.0.2, 127.0.0.3]", "min_nodes": 2, "sharing": "passes", "join_timeout_s": 5,
        "control_port": held_port(), "master_port": held_port(),
    }  # fmt: skip
    line = ["--name", "hosts", *(word for key, value in elastic.items() for word in ("-o", f"cluster.{key}={value}"))]
    line += [TORCH, *FP64]
    for here in (first, second):
        here.mkdir()
    command = [sys.executable, "-m", "mtrain", "run", *QUIET, "--node-rank", "1", *line]
    other = subprocess.Popen(command, cwd=second, stdout=subprocess.DEVNULL)
    result = done(first, "--node-rank", "0", *line)
    assert other.wait(60) == 0
    assert "runs without 127.0.0.3" in result.stdout
    # The job has a shard for each of its three hosts, whoever is there.
    assert summary(first, "hosts")["weights_sha256"] == summary(folder, "two")["weights_sha256"]
    assert largest_difference(weights(first, "hosts"), weights(folder, "three")) <= 1e-12


EXCHANGE = """
import torch
import mtrain
from torch import nn

with mtrain.session() as session:
    model, optimizer = session.prepare(
        lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        optimizer=mtrain.SGD(learning_rate=0.1), {prepare}
    )
    data = [(torch.ones(8) * number, number % 2) for number in range(24)]
    session.collective.all_gather(1)  # between micro batches a script exchanges what it likes
    for inputs, targets in session.batches(data, global_batch={batch}, epochs=1):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        {body}
        optimizer.update(loss)
"""


def exchange(folder: Path, **settings: object) -> str:
    script = folder / "exchange.py"
    script.write_text(EXCHANGE.format(**{"prepare": "", "batch": 12, "body": "pass", **settings}))
    return str(script)


@pytest.mark.job
def test_normalisation_and_its_running_statistics_are_those_of_shards(tmp_path):
    script = exchange(tmp_path, prepare="precision='fp64'")
    done(tmp_path, "--name", "three", *ranks(3), script)
    done(tmp_path, "--name", "two", *ranks(2), *SHARDS, script)
    done(tmp_path, "--name", "free", *ranks(2), script)
    three = weights(tmp_path, "three")
    assert int(three["1.num_batches_tracked"]) == int(weights(tmp_path, "two")["1.num_batches_tracked"]) == 2
    assert largest_difference(weights(tmp_path, "two"), three) <= 1e-12
    assert largest_difference(weights(tmp_path, "free"), three) > 1e-4


@pytest.mark.job
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prepare": "sync_batchnorm=True"}, "sync_batchnorm takes statistics over all shards"),
        ({"body": "session.collective.all_reduce(loss.detach(), 'sum')"}, "session.collective.all_reduce"),
        ({"batch": 8}, "global_batch=8 does not divide among 3 shards x 1 micro batches; use a multiple of 3"),
    ],
    ids=["batchnorm", "exchange", "batch"],
)
def test_what_needs_a_rank_per_shard_is_one_sentence(settings, sentence, tmp_path):
    result = run(tmp_path, *ranks(2), *SHARDS, exchange(tmp_path, **settings), timeout_s=120)
    assert result.returncode == 2, result.stdout + result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.job
def test_parts_of_a_stream_and_statistics_of_all_shards_are_refused_where_ranks_are_not_shards(tmp_path):
    result = run(tmp_path, *ranks(2), *SHARDS, STREAM, "--kind", "parts", timeout_s=120)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "shard= given" in result.stderr
    assert "Traceback" not in result.stderr
    result = run(tmp_path, *ranks(2), *SHARDS, "-o", "train.sync_batchnorm=true", TORCH)
    assert result.returncode == 2
    assert "train.sync_batchnorm: it normalises over all shards" in result.stderr
