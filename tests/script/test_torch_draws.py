"""Random numbers of a script's loop: seeded for each micro batch, those of numpy and random too, or the plain loop's own."""

import random
import sys

import numpy as np
import pytest
import torch

import mtrain
from mtrain.core.checkpoint import store
from mtrain.errors import ScriptError
from tests.script.in_process import Killed, rank_of
from tests.script.runs import largest_difference

SOLO = ("backend.name=solo", "backend.options.framework=torch")
DATA = np.random.default_rng(0).normal(size=(24, 6))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 6))


class Jitter:
    """Samples that draw from all generators while they are read."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> np.ndarray:
        return DATA[index] + 0 * (random.random() + np.random.rand() + torch.rand(()).item())


def loss_of(model, x: torch.Tensor) -> torch.Tensor:
    """A loss with noise of torch, of its distributions, mixup by numpy, and a choice of random."""
    noise = torch.distributions.Normal(0.0, 1.0).sample(x.shape).to(x) + torch.randn_like(x)
    share, order = np.random.beta(0.5, 0.5), np.random.permutation(len(x))
    mixed = share * x + (1 - share) * x[order]
    return (model(mixed + noise) - x).square().mean() * random.choice([1.0, 2.0])


def plain() -> dict:
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)
    model = net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for first in range(0, 24, 6):
            optimizer.zero_grad()
            loss_of(model, torch.from_numpy(DATA[first : first + 6])).backward()
            optimizer.step()
    return {name: x.numpy() for name, x in model.state_dict().items()}


def trained(folder, *overrides: str, resume=None, kill=None, reseed=False, dataset=None, **loop) -> dict:
    random.seed(1)
    np.random.seed(2)
    with rank_of(folder, *SOLO, "checkpoint.every_updates=1", *overrides, resume=resume):
        try:
            with mtrain.session(reseed=reseed) as session:
                optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
                model, optimizer = session.prepare(net, optimizer=optimizer, seed=0)
                order = {"order": lambda epoch: range(24)}
                for x in session.batches(DATA if dataset is None else dataset, global_batch=6, epochs=2, **order):
                    optimizer.update(loss_of(model, x))
                    session.evaluate(model, Jitter(), metric=lambda a, b: 0.0, step=lambda model, x: (model(x), x))
                    if session.progress.update == kill:
                        raise Killed
        except Killed:
            pass
    return store.load(store.newest(folder / "checkpoints")).state.weights


@pytest.mark.parametrize("dataset", [DATA, Jitter()])
def test_without_seeds_one_rank_draws_what_the_plain_loop_draws(tmp_path, dataset):
    """Reading and evaluating samples that draw changes nothing either."""
    expected = plain()
    assert largest_difference(trained(tmp_path / "run", dataset=dataset), expected) == 0
    assert largest_difference(trained(tmp_path / "seeded", reseed=True), expected) > 1e-3


def test_draws_of_the_script_go_on_where_a_killed_job_has_left_them(tmp_path):
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "cut", kill=5)
    cut = trained(tmp_path / "cut", resume=store.newest(tmp_path / "cut/checkpoints"))
    assert largest_difference(cut, whole) == 0


def test_numpy_and_random_are_seeded_for_each_shard_as_torch_is(tmp_path):
    def drawn(folder, shards: int, workers: int) -> list:
        found = []
        with rank_of(folder, *SOLO, f"cluster.shards={shards}"), mtrain.session() as session:
            model, optimizer = session.prepare(net, optimizer=mtrain.SGD(learning_rate=0.1))
            random.seed(len(found))
            for x in session.batches(DATA, global_batch=12, updates=3, order=lambda epoch: range(24)):
                found.append((random.random(), np.random.rand(), torch.rand(()).item()))
                np.random.seed(workers)  # whatever a script does in between
                optimizer.update(model(x).mean())
        return found

    one, two = drawn(tmp_path / "a", 2, 3), drawn(tmp_path / "b", 2, 4)
    assert one == two
    assert len(set(one)) == 6, "shards and updates have numbers of their own"


def test_a_script_that_makes_its_batches_draws_alike_on_every_rank_from_numpy_and_random(tmp_path, monkeypatch):
    from mtrain.core.samples.sampler import Shares

    monkeypatch.setattr(Shares, "shard", lambda self, number: place)
    found = []
    for place in (0, 1):
        with rank_of(tmp_path / str(place), *SOLO), mtrain.session() as session:
            model, optimizer = session.prepare(net, optimizer=mtrain.SGD(learning_rate=0.1))
            for _ in session.updates(2, global_batch=4):
                found.append((random.random(), np.random.rand(), torch.rand(()).item()))
                optimizer.update(model(torch.ones(4, 6, dtype=torch.float64)).mean())
    first, second = found[:2], found[2:]
    assert [each[:2] for each in first] == [each[:2] for each in second]
    assert [each[2] for each in first] != [each[2] for each in second]


def test_other_frameworks_refuse_to_leave_draws_to_the_script():
    from mtrain.rank.script.draws import OwnDraws

    with pytest.raises(ScriptError, match="reseed=False given with paddle; it is for backends on torch"):
        OwnDraws("paddle")
