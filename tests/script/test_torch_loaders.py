"""DataLoaders of torch that a script gives as they are: the samples, their order and their batches."""

import json

import numpy as np
import pytest
import torch
from torch.utils import data

import mtrain
from mtrain.errors import ScriptError
from mtrain.rank.script.reading.loaders import evaluation_part, read_loader

LENGTH = 20


class Numbers(data.Dataset):
    """Sample k is the number k."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Counted(data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(LENGTH, dtype=torch.float32).reshape(-1, 1))


class Buckets:
    """A batch sampler of the user's: batches of neighbours in an order that depends on the epoch."""

    def __init__(self, size, *, short=()):
        self.size, self.short, self.epoch = size, short, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batches = [list(range(first, first + self.size)) for first in range(0, LENGTH, self.size)]
        return iter([*np.roll(batches, self.epoch, axis=0).tolist(), *self.short])


def seen(loader, *, backend_seed=0, **settings):
    """Return the samples of each update of a session that trains on a loader, and the messages of its report."""
    updates, notes = [], []

    class Notes:
        def message(self, record):
            notes.append((record["kind"], record["message"]))

    with mtrain.session(reporters=[Notes()]) as session:
        model, optimizer = session.prepare(
            lambda: torch.nn.Linear(1, 1), optimizer=mtrain.SGD(learning_rate=1e-6), seed=backend_seed
        )
        for batch in session.batches(loader, **settings):
            updates.append([int(x) for x in batch.flatten()])
            optimizer.update(model(batch).mean())
    return updates, [text for kind, text in notes if kind == "warning"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_loader_that_shuffles_is_read_in_the_order_of_its_data_set():
    loader = data.DataLoader(Numbers(), batch_size=5, shuffle=True)
    assert seen(loader, epochs=2) == seen(Numbers(), global_batch=5, epochs=2)


def test_a_loader_in_order_is_read_in_order_with_its_collate():
    loader = data.DataLoader(Numbers(), batch_size=4, collate_fn=lambda rows: torch.stack(rows) * 2)
    updates, warnings = seen(loader, epochs=1)
    assert updates == [[2 * x for x in range(first, first + 4)] for first in range(0, LENGTH, 4)]
    assert warnings == []


def test_the_batch_of_the_call_wins():
    assert len(seen(data.DataLoader(Numbers(), batch_size=4), global_batch=10, epochs=1)[0]) == 2


def test_a_sampler_of_the_distributed_kind_gives_what_all_its_ranks_read_together():
    sampler = data.DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=5)
    updates, _ = seen(data.DataLoader(Numbers(), batch_size=4, sampler=sampler), epochs=2)
    ranks = [data.DistributedSampler(Numbers(), num_replicas=2, rank=rank, seed=5) for rank in range(2)]
    for epoch in range(2):
        for rank in ranks:
            rank.set_epoch(epoch)
        expected = [number for pair in zip(*ranks, strict=True) for number in pair]
        assert [x for update in updates[5 * epoch : 5 * epoch + 5] for x in update] == expected


def test_a_sampler_with_weights_draws_anew_in_each_epoch_and_the_same_in_each_run():
    def loader():
        generator = torch.Generator().manual_seed(7)
        sampler = data.WeightedRandomSampler([1.0] + [0.0] * 18 + [1.0], 10, generator=generator)
        return data.DataLoader(Numbers(), batch_size=5, sampler=sampler)

    updates, _ = seen(loader(), epochs=4)
    assert {x for update in updates for x in update} == {0, 19}
    assert len({tuple(update) for update in updates}) > 2
    assert seen(loader(), epochs=4)[0] == updates


def test_batches_of_the_users_own_are_the_updates():
    updates, warnings = seen(data.DataLoader(Numbers(), batch_sampler=Buckets(5)), epochs=2)
    batches = [list(range(first, first + 5)) for first in range(0, LENGTH, 5)]
    assert updates == [*batches, batches[-1], *batches[:-1]]
    assert warnings == []


def test_batches_of_different_lengths_are_the_updates():
    updates, _ = seen(data.DataLoader(Numbers(), batch_sampler=Buckets(5, short=[[1], [2, 3]])), epochs=2)
    batches = [list(range(first, first + 5)) for first in range(0, LENGTH, 5)]
    assert updates == [*batches, [1], [2, 3], batches[-1], *batches[:-1], [1], [2, 3]]


def test_a_data_set_that_makes_batches_itself_is_refused():
    with pytest.raises(ScriptError, match="batch_size=None given"):
        read_loader(data.DataLoader(Numbers(), batch_size=None), call="session.batches")


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_shorter_batch_is_used_as_the_loader_says(drop_last):
    loader = data.DataLoader(Numbers(), batch_size=6, shuffle=False, drop_last=drop_last)
    updates, _ = seen(loader, epochs=2)
    assert updates[: len(updates) // 2] == [batch.flatten().tolist() for batch in loader]
    assert updates == 2 * updates[: len(updates) // 2]


def test_the_last_shorter_batch_as_the_call_says():
    loader = data.DataLoader(Numbers(), batch_size=6)
    assert [len(x) for x in seen(loader, epochs=1, drop_last=True)[0]] == [6, 6, 6]
    assert [len(x) for x in seen(Numbers(), global_batch=6, epochs=1, drop_last=False)[0]] == [6, 6, 6, 2]


def test_a_stream_is_read_as_a_stream():
    updates, _ = seen(data.DataLoader(Counted(), batch_size=5, num_workers=2), updates=4)
    assert updates == [list(range(first, first + 5)) for first in range(0, LENGTH, 5)]


def test_workers_are_those_of_the_loader():
    assert read_loader(data.DataLoader(Numbers(), num_workers=2), call="x").workers == 2
    assert read_loader(Numbers(), call="x").workers == 0


def test_an_evaluation_takes_the_samples_that_the_sampler_gives():
    shuffled = data.DataLoader(Numbers(), batch_size=4, sampler=data.SubsetRandomSampler(range(LENGTH)))
    assert type(evaluation_part(read_loader(shuffled, call="x"))) is Numbers
    some = data.DataLoader(Numbers(), batch_size=4, sampler=data.SubsetRandomSampler([3, 5, 7]))
    with mtrain.session() as session:
        model, _ = session.prepare(lambda: torch.nn.Linear(1, 1), optimizer=mtrain.SGD(learning_rate=0.1))
        result = session.evaluate(
            model,
            some,
            metric=lambda x, _: {"sum": float(x.sum()), "count": len(x)},
            step=lambda _, batch: (batch, batch),
        )
    assert result == {"sum": 15.0, "count": 3}
    json.dumps(result)
