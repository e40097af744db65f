"""Updates of different lengths, and several data sets: the plain loop's weights, on any number of ranks, also after a kill."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import mtrain
from mtrain.core.samples.sampler import Shares
from mtrain.errors import ScriptError
from tests.script.runs import QUIET, SCRIPTS, done, largest_difference, run, summary, weights

sys.path.insert(0, str(SCRIPTS))
import train_batches
from points import Plain

from tests.starts import starts_processes

SCRIPT = str(SCRIPTS / "train_batches.py")
RANKS = {
    "ddp-2": ("-b", "ddp", "--nproc-per-node", "2"),
    "ddp-3": ("-b", "ddp", "--nproc-per-node", "3"),
    "horovod-2": ("-b", "horovod", "--nproc-per-node", "2"),
    "zero3-2": ("-b", "deepspeed", "--nproc-per-node", "2", "-o", "backend.options.stage=3"),
}


@pytest.mark.parametrize("length", [1, 2, 5, 12, 13])
@pytest.mark.parametrize(("size", "shards", "rounds"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (2, 3, 1), (1, 6, 1)])
def test_the_mean_over_shards_is_that_over_samples(length, size, shards, rounds):
    numbers = np.random.default_rng(0).normal(size=length)
    total = 0.0
    for rank in range(size):
        shares = Shares(rank=rank, size=size, shards=shards, rounds=rounds)
        for number, indices in enumerate(shares.spread(np.arange(length))):
            weight = shares.weight(number) * shares.fill(number, length)
            total += weight * float(numbers[indices].mean()) / (size * shares.passes)
    assert total == pytest.approx(float(numbers.mean()), rel=1e-13)


def test_what_divides_is_spread_as_before():
    shares = Shares(rank=1, size=2, shards=3, rounds=2)
    numbers = np.arange(24)
    assert [x.tolist() for x in shares.spread(numbers)] == [x.tolist() for x in shares.divide(numbers)]
    assert [shares.fill(number, 24) for number in range(shares.passes)] == [1.0] * shares.passes


def plain_weights(mode: str, batches: list[list[int]]) -> dict:
    """Return the weights after a plain loop of torch over these samples."""
    torch.manual_seed(0)
    model = train_batches.net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    data = train_batches.LABELLED
    for number, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + np.cos(np.pi * number / len(batches)))
        inputs = torch.from_numpy(data.inputs[batch].astype(np.float64))
        optimizer.zero_grad()
        train_batches.loss_of(model, (inputs, torch.from_numpy(data.targets[batch]))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
@starts_processes
def one_rank(tmp_path_factory):
    """A folder with a run of one rank for each mode."""
    here = tmp_path_factory.mktemp("one_rank")
    for mode in train_batches.MODES:
        done(here, "--name", mode, "-b", "solo", SCRIPT, mode)
    return here


@pytest.mark.smoke
def test_own_batches_train_as_a_plain_loop_over_them(one_rank):
    sampler, batches = train_batches.Buckets(50), []
    for epoch in range(train_batches.EPOCHS):
        sampler.set_epoch(epoch)
        batches += list(sampler)
    assert len({len(batch) for batch in batches}) > 4
    assert summary(one_rank, "buckets")["updates"] == len(batches)
    difference = largest_difference(weights(one_rank, "buckets"), plain_weights("buckets", batches))
    print(f"largest difference to the plain loop {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.parametrize(
    ("mode", "updates", "samples"), [("last", 20, 200), ("growing", 12 + 6 + 3 + 1, 48 + 48 + 48 + 32)]
)
def test_the_length_of_the_job_is_that_of_its_epochs(one_rank, mode, updates, samples):
    assert summary(one_rank, mode)["updates"] == updates
    lines = (one_rank / "runs" / mode / "metrics.jsonl").read_text().splitlines()
    assert any(f"{updates} updates, {samples} samples" in json.loads(line).get("message", "") for line in lines)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", train_batches.MODES)
@pytest.mark.parametrize(
    "ranks", ["ddp-2", *(pytest.param(name, marks=pytest.mark.slow) for name in RANKS if name != "ddp-2")]
)
def test_several_ranks_train_what_one_rank_trains(one_rank, tmp_path, mode, ranks):
    words = ["--accumulate", "2"] if (mode, ranks) == ("together", "ddp-3") else []
    done(tmp_path, "--name", "many", *RANKS[ranks], SCRIPT, mode, *words)
    difference = largest_difference(weights(tmp_path, "many"), weights(one_rank, mode))
    print(f"{mode} on {ranks}: largest difference to one rank {difference:.1e}")
    assert difference <= 1e-12


def test_accumulation_and_workers_do_not_matter(one_rank, tmp_path):
    done(tmp_path, "--name", "many", "-b", "solo", SCRIPT, "buckets", "--accumulate", "3", "--workers", "2")
    assert largest_difference(weights(tmp_path, "many"), weights(one_rank, "buckets")) <= 1e-12


@pytest.mark.parametrize(
    "mode", ["buckets", "together", *(pytest.param(x, marks=pytest.mark.slow) for x in ("growing", "last"))]
)
def test_a_killed_job_goes_on_to_the_same_bits(one_rank, tmp_path, mode):
    line = [sys.executable, "-m", "mtrain", "run", *QUIET, "--name", "killed", "-b", "solo"]
    line += ["-o", "checkpoint.every_updates=1", SCRIPT, mode, "--delay", "0.1"]
    job = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    folder = tmp_path / "runs/killed/checkpoints"
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob("step-0000000[7-9]")) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    done(tmp_path, "--resume", "runs/killed", SCRIPT, mode)
    lines = (tmp_path / "runs/killed/metrics.jsonl").read_text().splitlines()
    starts = [json.loads(line)["update"] for line in lines if json.loads(line)["kind"] == "start"]
    assert len(starts) == 2
    assert starts[1] > 0
    assert largest_difference(weights(tmp_path, "killed"), weights(one_rank, mode)) == 0


def session_of(dataset, *, sync_batchnorm=None, schedule=None, **settings):
    """Train on ``dataset``; return the first inputs of each batch."""
    seen = []
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: torch.nn.Linear(8, 2),
            optimizer=mtrain.SGD(learning_rate=1e-3),
            sync_batchnorm=sync_batchnorm,
            schedule=schedule,
        )
        for batch in session.batches(dataset, **settings):
            seen.append(batch)
            optimizer.update(train_batches.loss_of(model, batch[-1] if isinstance(dataset, tuple) else batch))
    return seen


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


def numbers_of(batches) -> list[list[float]]:
    return [batch[0][:, 0].tolist() for batch in batches]


def test_several_data_sets_are_read_in_orders_of_their_own_and_begin_again(here):
    one, other = Plain(8, 0), Plain(8, 0)
    batches = session_of({"labelled": one, "other": other}, global_batch={"labelled": 2, "other": 4}, epochs=2)
    assert len(batches) == 8
    first, second = (numbers_of(batch[name] for batch in batches) for name in ("labelled", "other"))
    flat = lambda rows: [x for row in rows for x in row]  # noqa: E731
    all_numbers = sorted(float(x) for x in one.inputs[:, 0])
    assert sorted(flat(first[:4])) == sorted(flat(first[4:])) == all_numbers
    for epoch in range(4):
        assert sorted(flat(second[2 * epoch : 2 * epoch + 2])) == all_numbers
    assert flat(first[:4]) != flat(second[:2]), "data sets of one length are read in different orders"
    assert len({tuple(flat(second[2 * epoch : 2 * epoch + 2])) for epoch in range(4)}) == 4, "each in a new order"


def test_a_tuple_of_loaders_gives_a_tuple_of_batches(here):
    loaders = tuple(torch.utils.data.DataLoader(Plain(n, 0), batch_size=4) for n in (8, 12))
    batches = session_of(loaders, epochs=1)
    assert [len(batch) for batch in batches] == [2, 2]
    assert torch.equal(batches[0][1][0], torch.from_numpy(Plain(12, 0).inputs[:4]))


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Plain(8, 0))


REFUSED = {
    "no number for one": ({"a": Plain(8, 0), "b": Plain(8, 0)}, {"global_batch": 4}, "expected a number for each, such as {'a': 32, 'b'"),
    "an order": ({"a": Plain(8, 0)}, {"global_batch": {"a": 4}, "order": lambda epoch: [0]}, "give each as a DataLoader"),
    "own batches": (
        {"a": torch.utils.data.DataLoader(Plain(8, 0), batch_sampler=train_batches.Buckets(8))}, {}, "makes batches of its own",
    ),
    "a batch of no samples": (Plain(8, 0), {"global_batch": lambda epoch: 0}, "gave 0 for epoch 0; expected a number of samples"),
    "a batch that is too large": (Plain(8, 0), {"global_batch": lambda epoch: 4 + 8 * epoch}, "gave 12 for epoch 1"),
    "an epoch without a batch": (
        torch.utils.data.DataLoader(Plain(8, 0), batch_sampler=train_batches.Buckets(0)), {}, "no batch in epoch 0",
    ),
    "a stream": (Endless(), {"global_batch": lambda epoch: 4}, "a stream's epochs have no known length"),
    "a schedule in epochs": (
        Plain(8, 0), {"global_batch": lambda epoch: 4, "schedule": mtrain.Step(milestones=[1])}, "counts epochs, but epochs differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(name, here):
    dataset, settings, message = REFUSED[name]
    with pytest.raises(ScriptError) as error:
        session_of(dataset, epochs=2, **settings)
    assert message in str(error.value), error.value


class Lying(train_batches.Buckets):
    def __len__(self):
        return 3


def test_a_batch_sampler_whose_length_is_wrong_is_named(here):
    with pytest.raises(ScriptError, match=r"has a length of 3, but gave \d batches for epoch 0"):
        session_of(torch.utils.data.DataLoader(Plain(8, 0), batch_sampler=Lying(8)), epochs=2)


@pytest.mark.job
def test_a_rank_without_a_sample_and_synchronised_statistics_do_not_go_together(tmp_path):
    script = tmp_path / "script.py"
    text = (SCRIPTS / "train_batches.py").read_text()
    script.write_text(text.replace('precision="fp64"', 'precision="fp64", sync_batchnorm=True'))
    (tmp_path / "points.py").write_text((SCRIPTS / "points.py").read_text())
    result = run(tmp_path, *RANKS["ddp-2"], str(script), "buckets")
    assert result.returncode != 0
    assert "of the 2 samples that one in each micro batch of each rank would need" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.smoke
@pytest.mark.job
def test_another_batch_after_a_resume_is_refused(tmp_path):
    done(tmp_path, "--name", "first", "-b", "solo", SCRIPT, "last")
    result = run(tmp_path, "--resume", "runs/first", SCRIPT, "growing")
    assert result.returncode == 2
    assert "with the data and batches of now it would be at epoch 2, position 2" in result.stdout + result.stderr


GROWN = """
import os
import numpy as np
import torch
import mtrain

rows = [(np.full(2, float(n), np.float32), np.float32(n)) for n in range(int(os.environ["ROWS"]))]
with mtrain.session() as session:
    model, optimizer = session.prepare(lambda: torch.nn.Linear(2, 1), optimizer=mtrain.SGD(learning_rate=1e-4))
    for points, values in session.batches(rows, global_batch=4, epochs=1):
        optimizer.update(((model(points)[:, 0] - values) ** 2).mean())
"""


@pytest.mark.job
def test_a_data_set_that_has_grown_is_refused_in_the_first_epoch_too(tmp_path, monkeypatch):
    (tmp_path / "grown.py").write_text(GROWN)
    monkeypatch.setenv("ROWS", "16")
    done(
        tmp_path,
        "--name",
        "first",
        "-b",
        "solo",
        "-o",
        "checkpoint.every_updates=2",
        "-o",
        "checkpoint.keep_last=9",
        "grown.py",
    )
    monkeypatch.setenv("ROWS", "20")
    result = run(tmp_path, "--resume", "runs/first/checkpoints/step-00000002", "grown.py")
    assert result.returncode == 2
    assert (
        "the training split has 20 samples, and had 16 when the checkpoint was written" in result.stdout + result.stderr
    )
