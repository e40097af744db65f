"""What a script's job records: the update that an evaluation belongs to, and means over the micro batches of an update."""

import sys
from collections.abc import Mapping
from typing import Any

import pytest

import mtrain
from tests.script.runs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
from points import Plain, accuracy


@pytest.fixture
def torch(monkeypatch, tmp_path):
    """torch, in an empty folder."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    return torch


def prepared(torch: Any, session: Any, **settings: Any) -> Any:
    return session.prepare(lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1), **settings)


def loss_of(torch: Any, model: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_evaluation_is_recorded_after_the_updates_that_have_changed_the_weights(torch, accumulate):
    records: list[Mapping[str, Any]] = []
    with mtrain.session(reporters=[records.append]) as session:
        model, optimizer = prepared(torch, session, accumulate=accumulate)
        data = Plain(20, 1)
        session.evaluate(model, data, metric=accuracy)
        for batch in session.batches(Plain(24, 0), global_batch=8, updates=3):
            session.evaluate(model, data, metric=accuracy)
            optimizer.update(loss_of(torch, model, batch))
            session.evaluate(model, data, metric=accuracy)
        session.evaluate(model, data, metric=accuracy)
    found = [record["update"] for record in records if record["kind"] == "evaluation"]
    before_and_after = {1: [0, 1, 1, 2, 2, 3], 2: [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]}
    assert found == [0, *before_and_after[accumulate], 3]


def test_recorded_values_are_means_over_the_micro_batches_of_an_update(torch):
    records: list[Mapping[str, Any]] = []
    losses: list[float] = []
    with mtrain.session(reporters=[records.append]) as session:
        model, optimizer = prepared(torch, session, accumulate=2)
        for number, batch in enumerate(session.batches(Plain(24, 0), global_batch=8, updates=3)):
            loss = loss_of(torch, model, batch)
            losses.append(float(loss.detach()))
            optimizer.update(loss)
            session.log(number=number, square=torch.tensor(float(number**2)))
    updates = [record["losses"] for record in records if record["kind"] == "update"]
    assert [update["number"] for update in updates] == [0.5, 2.5, 4.5]
    assert [update["square"] for update in updates] == [0.5, 6.5, 20.5]
    means = [(losses[place] + losses[place + 1]) / 2 for place in (0, 2, 4)]
    assert [update["loss"] for update in updates] == pytest.approx(means, rel=1e-6)
