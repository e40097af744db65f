"""Optimizers that compute the loss several times per update: `optimizer.step(closure)`."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import mtrain
from mtrain.errors import MtrainError
from tests.script.runs import SCRIPTS, done, largest_difference, run, summary, weights

sys.path.insert(0, str(SCRIPTS))
from points import Plain

from tests.starts import starts_processes

SCRIPT = str(SCRIPTS / "train_closure.py")
SEARCHES = {"steps": {}, "wolfe": {"SEARCH": "strong_wolfe"}}


@pytest.fixture(scope="module")
@starts_processes
def plain(tmp_path_factory):
    """The weights of the plain script by line search."""
    known = {}
    for name, environ in SEARCHES.items():
        file = tmp_path_factory.mktemp("plain") / "weights.npz"
        subprocess.run(
            [sys.executable, SCRIPT, str(file)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environ}
        )
        with np.load(file) as arrays:
            known[name] = dict(arrays)
    return known


@pytest.mark.parametrize("search", SEARCHES)
def test_one_rank_trains_the_bits_of_the_plain_script(search, plain, tmp_path):
    done(tmp_path, "--name", "one", "-b", "solo", SCRIPT, environ=SEARCHES[search])
    assert largest_difference(weights(tmp_path, "one"), plain[search]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()]
    losses = [line["losses"]["loss"] for line in lines if line["kind"] == "update"]
    assert len(losses) == 6
    assert losses[-1] < 0.4 * losses[0]
    shown = next(line["message"] for line in lines if line["kind"] == "note" and "after 6" in line["message"])
    assert f"loss {losses[-1]:.6f}" in shown, "the loss of an update is that of its first evaluation"


@pytest.mark.parametrize(
    ("backend", "size", "search"),
    [
        ("ddp", 2, "wolfe"),
        pytest.param("ddp", 3, "steps", marks=pytest.mark.slow),
        pytest.param("horovod", 2, "wolfe", marks=pytest.mark.slow),
    ],
)
def test_several_ranks_decide_alike(backend, size, search, plain, tmp_path):
    done(tmp_path, "--name", "some", "-b", backend, "--nproc-per-node", str(size), SCRIPT, environ=SEARCHES[search])
    difference = largest_difference(weights(tmp_path, "some"), plain[search])
    print(f"{search} on {size} ranks of {backend}: largest difference to the plain script {difference:.1e}")
    assert difference <= 1e-11  # it divides by differences of gradients, so rounding grows


@pytest.mark.parametrize("search", SEARCHES)
def test_a_killed_job_goes_on_to_the_same_bits(search, plain, tmp_path):
    environ = SEARCHES[search]
    killed = run(tmp_path, "--name", "killed", "-b", "solo", SCRIPT, environ={**environ, "KILLED_IN": "4"})
    assert killed.returncode
    done(tmp_path, "--resume", "runs/killed", SCRIPT, environ=environ)
    assert summary(tmp_path, "killed")["updates"] == 6
    assert largest_difference(weights(tmp_path, "killed"), plain[search]) == 0


def trained(step, *, optimizer=None, **settings):
    """Make one update by ``step(model, optimizer, batch)``; return the weights and the norm."""
    optimizer = optimizer or (lambda model: torch.optim.LBFGS(model.parameters()))
    with mtrain.session() as session:
        model, updater = session.prepare(lambda: torch.nn.Linear(8, 2), optimizer=optimizer, **settings)
        for batch in session.batches(Plain(8, 0), global_batch=8, updates=1):
            step(model, updater, batch)
        return model.weight.detach().clone(), session


def closure_of(model, updater, batch, *, factor=1.0):
    def closure():
        loss = factor * torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        updater.backward(loss)
        return loss

    return closure


CALLS = {
    "no overlap=False": (lambda m, u, b: u.step(closure_of(m, u, b)), {}, "overlap=False"),
    "no closure": (
        lambda m, u, b: u.update(torch.nn.functional.cross_entropy(m(b[0]), b[1])), {"overlap": False}, "optimizer.step(closure) with a",
    ),
    "no backward": (lambda m, u, b: u.step(lambda: 1.0), {"overlap": False}, "the closure did not call optimizer.backward"),
    "update in it": (
        lambda m, u, b: u.step(lambda: u.update(torch.nn.functional.cross_entropy(m(b[0]), b[1]))),
        {"overlap": False, "optimizer": lambda m: torch.optim.NAdam(m.parameters())},
        "optimizer.update (update 0, micro batch 0 of 1): called inside of the closure",
    ),
    "step in it": (
        lambda m, u, b: u.step(lambda: [closure_of(m, u, b)(), u.step()]),
        {"overlap": False, "optimizer": lambda m: torch.optim.NAdam(m.parameters())},
        "a closure calls backward(loss) alone; move this call behind step(closure)",
    ),
    "backward before": (
        lambda m, u, b: [closure_of(m, u, b)(), u.step(closure_of(m, u, b))], {"overlap": False}, "called after a loss of this batch",
    ),
    "accumulation": (
        lambda m, u, b: u.step(closure_of(m, u, b)), {"overlap": False, "accumulate": 2}, "this rank has 2 of an update",
    ),
    "a rule": (
        lambda m, u, b: u.step(closure_of(m, u, b)),
        {"overlap": False, "optimizer": mtrain.SGD(learning_rate=0.1)},
        "computes its loss once",
    ),
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_are_refused_in_one_sentence(name, here):
    step, settings, message = CALLS[name]
    with pytest.raises(MtrainError) as error:
        trained(step, **settings)
    assert message in str(error.value), error.value


def test_an_update_whose_first_gradient_is_not_finite_changes_nothing(here):
    def step(model, updater, batch):
        before.append(model.weight.detach().clone())
        updater.step(closure_of(model, updater, batch, factor=float("inf")))

    before: list[torch.Tensor] = []
    after, session = trained(step, overlap=False)
    assert torch.equal(before[0], after)
    assert session.progress.skipped == 1


def test_an_elementwise_optimizer_with_a_closure_is_its_step(here):
    adam = lambda model: torch.optim.NAdam(model.parameters(), lr=0.1)  # noqa: E731
    one, _ = trained(lambda m, u, b: u.step(closure_of(m, u, b)), optimizer=adam, overlap=False, clip_norm=0.1)
    other, _ = trained(
        lambda m, u, b: u.update(torch.nn.functional.cross_entropy(m(b[0]), b[1])), optimizer=adam, clip_norm=0.1
    )
    assert torch.equal(one, other)
