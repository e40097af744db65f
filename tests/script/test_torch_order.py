"""`order=` of a script: the numbers that it gives are the samples of the epoch, for every number of ranks."""

import itertools
import shutil
import sys

import numpy as np
import pytest

import mtrain
from mtrain.core.samples.sampler import Shares
from mtrain.data import trees
from mtrain.errors import ScriptError
from mtrain.rank.script.reading.loaders import Selection
from mtrain.rank.script.reading.samples import Samples
from tests.script.runs import SCRIPTS, done, largest_difference, run, summary, weights

sys.path.insert(0, str(SCRIPTS))
from points import Plain, Points

ONE_RANK = Shares(rank=0, size=1, shards=1, rounds=1)


@pytest.fixture
def torch(monkeypatch, tmp_path):
    """torch, in an empty folder."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    return torch


def loss_of(torch, model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def with_replacement(epoch):
    return np.random.default_rng(epoch).integers(6, size=22)


ORDERS = {
    "longer than the data set": lambda epoch: [*range(6), *range(6), *range(6), 5 - epoch, 1, 2, 3],
    "shorter than the data set": lambda epoch: [4, 0, epoch, 2],
    "with replacement": with_replacement,
    "a tensor": lambda epoch: __import__("torch").tensor([3, 3, 1, 0, 5 - epoch]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_any_length_trains_as_a_plain_loop_over_its_numbers(name, torch):
    data, order = Plain(6, 0), ORDERS[name]
    torch.manual_seed(0)
    own = torch.nn.Linear(8, 2)
    native = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9, fused=True)
    updates = 0
    for epoch in range(2):
        numbers = [int(number) for number in order(epoch)]
        for start in range(0, len(numbers) - 3, 4):
            native.zero_grad()
            batch = [torch.from_numpy(x) for x in trees.collate([data[i] for i in numbers[start : start + 4]])]
            loss_of(torch, own, batch).backward()
            native.step()
            updates += 1
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1, momentum=0.9)
        )
        for batch in session.batches(data, global_batch=4, epochs=2, order=order):
            optimizer.update(loss_of(torch, model, batch))
        assert session.progress.update == updates
        assert session.progress.epoch == 2
        assert torch.equal(model.weight, own.weight)


@pytest.mark.parametrize(
    ("shuffle", "own", "ordered"),
    [
        *[(False, own, True) for own in (None, False, True)],
        *[(True, own, False) for own in (None, False, True)],
        (None, None, False),
        (None, False, True),
    ],
)
def test_shuffle_of_the_call_wins_over_that_of_the_loader(torch, shuffle, own, ordered):
    data = torch.arange(32.0)
    loader = data if own is None else torch.utils.data.DataLoader(data, batch_size=8, shuffle=own)
    with mtrain.session() as session:
        model, optimizer = session.prepare(lambda: torch.nn.Linear(8, 1), optimizer=mtrain.SGD(learning_rate=0.1))
        read = []
        for batch in session.batches(loader, global_batch=8, epochs=2, shuffle=shuffle):
            read.append(batch.clone())
            optimizer.update(model(batch).sum())
    first, second = torch.cat(read).split(32)
    assert torch.equal(first.sort().values, data)
    assert [torch.equal(first, data), torch.equal(second, data)] == [ordered, ordered]
    assert ordered or not torch.equal(first, second)


def samples_of(order, *, length=6, global_batch=4, dataset=None):
    return Samples(
        Selection(dataset=dataset or Plain(length, 0), batch=global_batch, order=order, collate=list),
        seed=1,
        seed_framework=lambda seed: None,
    )


@pytest.mark.parametrize(("size", "accumulate"), [*itertools.product((1, 2, 3), (1, 2))])
def test_the_ranks_together_read_the_numbers_of_the_order(size, accumulate):
    samples = samples_of(with_replacement, global_batch=12, length=6)
    for start in (0, 1):
        read = []
        for rank in range(size):
            shares = Shares(rank=rank, size=size, shards=size, rounds=accumulate)
            batches = samples.micro_batches(1, start, shares=shares)
            read += [tuple(point) for batch in batches for point, _ in batch]
        expected = [tuple(Plain(6, 0)[number][0]) for number in with_replacement(1)[start * 12 : 12]]
        assert sorted(read) == sorted(expected)


def test_each_repetition_of_a_number_is_varied_differently():
    jittered = samples_of(lambda epoch: [3, 3, 3, 1], dataset=Points(6, 0))
    (batch,) = jittered.micro_batches(0, 0, shares=ONE_RANK)
    first, second, third, _ = (point for point, _ in batch)
    assert len({first.tobytes(), second.tobytes(), third.tobytes()}) == 3
    assert np.allclose(first, Points(6, 0).inputs[3], atol=0.1)
    assert np.allclose(third, Points(6, 0).inputs[3], atol=0.1)
    assert np.array_equal(first, jittered.sample(0, 3)[0])


def test_a_sampler_that_draws_from_the_framework_gives_every_rank_the_same_order(torch):
    data = Plain(6, 0)

    def order(epoch):
        return list(torch.utils.data.WeightedRandomSampler([1.0, 2, 3, 4, 5, 6], 40))

    def read(seed):
        torch.manual_seed(seed)
        selection = Selection(dataset=data, batch=4, order=order, collate=list)
        samples = Samples(selection, seed=1, seed_framework=torch.manual_seed)
        return [
            [point.tobytes() for batch in samples.micro_batches(epoch, 0, shares=ONE_RANK) for point, _ in batch]
            for epoch in (0, 1)
        ]

    assert read(1) == read(2)
    assert read(1)[0] != read(1)[1]


REFUSED = {
    "a number beyond the data set": (lambda epoch: [0, 1, 2, 6], "number 6"),
    "a negative number": (lambda epoch: [0, 1, 2, -1], "number -1"),
    "fractions": (lambda epoch: [0.0, 1.5, 2.0, 3.0], "whole numbers"),
    "truth values": (lambda epoch: [True] * 6, "whole numbers"),
    "pairs": (lambda epoch: [[0, 1], [2, 3], [4, 5], [0, 0]], "whole numbers"),
    "no numbers": (lambda epoch: None, "numbers"),
    "fewer than an update needs": (lambda epoch: [0, 1, 2], "gave 3 numbers"),
    "another length in a later epoch": (lambda epoch: list(range(4 + 2 * epoch)) * 2, "epoch 1"),
    "no function": (range(6), "function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_that_cannot_be_followed_is_refused(name):
    order, sentence = REFUSED[name]

    def read():
        samples = samples_of(order)
        for epoch in (0, 1):
            list(samples.micro_batches(epoch, 0, shares=ONE_RANK))

    with pytest.raises(ScriptError) as raised:
        read()
    assert "order" in str(raised.value)
    assert sentence in str(raised.value)


def test_an_order_that_differs_when_it_is_called_again_is_refused():
    generator = np.random.default_rng(0)
    samples = samples_of(lambda epoch: generator.permutation(6))
    with pytest.raises(ScriptError, match=r"order.*called twice"):
        samples.check_repeatable()
    samples_of(with_replacement).check_repeatable()


class Understated:
    """A stream that says to be half as long as it is."""

    def __len__(self):
        return 32

    def __iter__(self):
        points = Plain(64, 0)
        return (points[index] for index in range(64))


def test_a_stream_that_is_longer_than_its_length_is_refused(torch):
    def train():
        with mtrain.session() as session:
            model, optimizer = session.prepare(lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1))
            for batch in session.batches(Understated(), global_batch=8, epochs=1):
                optimizer.update(loss_of(torch, model, batch))

    with pytest.raises(ScriptError, match=r"32.*goes on"):
        train()


SCRIPT = """
import sys
sys.path.insert(0, {scripts!r})
import numpy as np
import torch
import mtrain
from points import Points

with mtrain.session() as session:
    model, optimizer = session.prepare(lambda: torch.nn.Linear(8, 2).double(), optimizer=mtrain.AdamW(learning_rate=0.1), precision="fp64")
    order = lambda epoch: np.random.default_rng([epoch, {apart}]).integers(9, size=27)
    for inputs, targets in session.batches(Points(9, 0), global_batch=6, epochs=3, order=order):
        optimizer.update(torch.nn.functional.cross_entropy(model(inputs), targets))
"""


@pytest.mark.job
def test_an_order_resumes_in_mid_epoch_on_other_ranks_to_the_same_weights(tmp_path):
    script = tmp_path / "own_order.py"
    script.write_text(SCRIPT.format(scripts=str(SCRIPTS), apart="0"))
    keep = ("-o", "checkpoint.keep_last=9", "checkpoint.every_updates=6")
    done(tmp_path, "--name", "whole", "--backend", "solo", *keep, str(script))
    assert summary(tmp_path, "whole")["updates"] == 12
    shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/cut")
    for later in ("step-00000008", "step-00000012"):
        shutil.rmtree(tmp_path / "runs/cut/checkpoints" / later)
    result = done(tmp_path, "--resume", "runs/cut", "--backend", "ddp", "--nproc-per-node", "2", *keep, str(script))
    assert "step-00000006" in result.stdout
    assert largest_difference(weights(tmp_path, "cut"), weights(tmp_path, "whole")) <= 1e-12


@pytest.mark.smoke
@pytest.mark.job
def test_ranks_with_different_orders_end_the_job(tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(SCRIPT.format(scripts=str(SCRIPTS), apart="session.rank"))
    result = run(tmp_path, "--nproc-per-node", "2", str(script), timeout_s=120)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "order" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
