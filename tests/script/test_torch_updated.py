"""When an update is complete, for schedulers and averages of a script's own, and how the decay of an average rises."""

import sys

import numpy as np
import pytest
import torch

import mtrain
from mtrain.core.checkpoint import store
from mtrain.errors import ScriptError
from tests.script.in_process import rank_of

SOLO = ("backend.name=solo", "backend.options.framework=torch")
DATA = [np.random.default_rng(number).normal(size=4) for number in range(24)]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


class PerUpdate:
    """A scheduler of another library: it sets learning rates by the number of the update."""

    def __init__(self, optimizer) -> None:
        self.optimizer, self.last = optimizer, 0

    def step(self, epoch: int) -> None: ...

    def step_update(self, number: int) -> None:
        self.last = number
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)

    def state_dict(self) -> dict:
        return {"last": self.last}

    def load_state_dict(self, state: dict) -> None:
        self.last = state["last"]


def own(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_its_scheduler(model):
    optimizer = own(model)
    return optimizer, PerUpdate(optimizer)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "words",
    [
        {"optimizer": mtrain.SGD(learning_rate=0.1), "scheduler": PerUpdate},
        {"optimizer": own, "scheduler": PerUpdate},
        {"optimizer": with_its_scheduler},
    ],
)
def test_a_scheduler_per_update_has_the_rates_of_the_plain_loop(tmp_path, words, shards):
    rates, told = [], []
    with rank_of(tmp_path / "run", *SOLO, f"cluster.shards={shards}"), mtrain.session() as session:
        model, optimizer = session.prepare(lambda: torch.nn.Linear(4, 1), accumulate=2, **words)
        told.append(optimizer.updated)
        for x in session.batches(DATA, global_batch=12, updates=3):
            told.append(optimizer.updated)
            optimizer.update(model(x).square().mean())
            told.append(optimizer.updated)
            if optimizer.updated:
                rates.append(optimizer.rates.learning_rates[0])
                optimizer.scheduler.step_update(session.progress.update + 1)
    assert rates == pytest.approx([0.1, 0.1 / 2, 0.1 / 3], rel=1e-15)
    # Before the first micro batch of an update it tells nothing of the one before.
    each = [False, False] * (2 * shards - 1) + [False, True]
    assert told == [False, *each * 3]


def test_a_dropped_update_is_not_complete_and_one_that_is_not_finite_is(tmp_path):
    told = []
    with rank_of(tmp_path / "run", *SOLO), mtrain.session() as session:
        model, optimizer = session.prepare(lambda: torch.nn.Linear(4, 1), optimizer=mtrain.SGD(learning_rate=0.1))
        for number, x in enumerate(session.batches(DATA, global_batch=12, updates=3)):
            optimizer.backward(model(x).mean() * (float("inf") if number == 2 else 1.0))
            optimizer.skip() if number == 1 else optimizer.step()
            told.append(optimizer.updated)
    assert told == [True, False, True]


def average(folder, ema) -> np.ndarray:
    with rank_of(folder, *SOLO), mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: torch.nn.Linear(4, 1), optimizer=mtrain.SGD(learning_rate=0.1), ema=ema, seed=1
        )
        for x in session.batches(DATA, global_batch=12, updates=2):
            optimizer.update(model(x).square().mean())
    return store.load(store.newest(folder / "checkpoints")).state.ema["weight"]


def test_the_decay_of_an_average_rises_where_that_is_asked_for(tmp_path):
    constant, also = average(tmp_path / "a", 0.9), average(tmp_path / "b", {"decay": 0.9})
    rising = average(tmp_path / "c", {"decay": 0.9, "ramp": 50})
    assert np.array_equal(constant, also)
    weights = store.load(store.newest(tmp_path / "c/checkpoints")).state.weights["weight"]
    # With d = 0.9 * (1 - exp(-k / 50)) the average is nearly the weights themselves after two updates.
    assert np.abs(rising - weights).max() < 0.1 * np.abs(constant - weights).max()
    with pytest.raises(ScriptError, match=r"train\.ema"):
        average(tmp_path / "d", {"decay": 0.9, "rump": 50})
