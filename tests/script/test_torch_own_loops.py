"""Loops of a script's own form: epochs with code at their end, batches that the script makes, gradients of each loss."""

import sys

import numpy as np
import pytest
import torch

import mtrain
from mtrain.errors import ScriptError
from tests.script.runs import SCRIPTS, run

sys.path.insert(0, str(SCRIPTS))
from points import Plain

LOADER = torch.utils.data.DataLoader(Plain(48, 0), batch_size=8)


@pytest.fixture(autouse=True)
def script(monkeypatch, tmp_path):
    """An empty folder, as a script's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


def prepared(session, **settings):
    return session.prepare(
        lambda: torch.nn.Linear(8, 2), **{"optimizer": mtrain.SGD(learning_rate=0.1), "seed": 3, **settings}
    )


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


# --------------------------------------------------------------------------------------------------------- epochs
def test_a_loop_over_epochs_trains_what_the_flat_loop_trains_with_its_code_at_the_end_of_each():
    with mtrain.session() as session:
        model, optimizer = prepared(session)
        ends = []
        for epoch in session.epochs(3):
            batches = 0
            for batch in session.batches(LOADER):
                optimizer.update(loss_of(model, batch))
                batches += 1
            ends.append((epoch, batches, session.progress.epoch, session.progress.update))
            session.log(of_epoch=epoch)
    assert ends == [(0, 6, 0, 5), (1, 6, 1, 11), (2, 6, 2, 17)]
    nested = [parameter.detach().clone() for parameter in model.parameters()]
    with mtrain.session() as session:
        model, optimizer = prepared(session)
        for batch in session.batches(LOADER, epochs=3):
            optimizer.update(loss_of(model, batch))
    for one, other in zip(nested, model.parameters(), strict=True):
        assert torch.equal(one, other)


def left_in_the_middle(session, model, optimizer):
    for _ in session.epochs(2):
        for batch in session.batches(LOADER):
            optimizer.update(loss_of(model, batch))
            break


def other_data(session, model, optimizer):
    for _ in session.epochs(2):
        for batch in session.batches(torch.utils.data.DataLoader(Plain(48, 0), batch_size=8)):
            optimizer.update(loss_of(model, batch))


def two_loops(session, model, optimizer):
    for _ in session.epochs(2):
        for batch in session.batches(LOADER):
            optimizer.update(loss_of(model, batch))
        for batch in session.batches(LOADER):
            optimizer.update(loss_of(model, batch))


def no_loop(session, model, optimizer):
    for _ in session.epochs(2):
        pass


def two_lengths(session, model, optimizer):
    for _ in session.epochs(2):
        session.batches(LOADER, epochs=3)


def last_batch_unused(session, model, optimizer):
    for _ in session.epochs(2):
        for number, batch in enumerate(session.batches(LOADER)):
            if number < 5:
                optimizer.update(loss_of(model, batch))


def updates_in_epochs(session, model, optimizer):
    for _ in session.epochs(2):
        session.updates(3, global_batch=4)


def shares(rows, **length):
    def misuse(session, model, optimizer):
        for _ in session.updates(3, global_batch=4):
            session.share(np.zeros((rows, 8), np.float32))

    return misuse


def loss_after_gradients(session, model, optimizer):
    for batch in session.batches(LOADER, epochs=1):
        optimizer.backward(loss_of(model, batch))
        optimizer.gradients()
        optimizer.backward(loss_of(model, batch))


def shared_outside(session, model, optimizer):
    session.share(np.zeros((4, 8)))


def in_batch(call):
    def misuse(session, model, optimizer):
        for batch in session.batches(LOADER, epochs=1):
            call(optimizer, loss_of(model, batch))

    return misuse


@pytest.mark.parametrize(
    ("misuse", "sentence"),
    [
        (left_in_the_middle, "left in the middle of an epoch"),
        (other_data, "another data set given than in the epoch before"),
        (two_loops, "called twice in one epoch of session.epochs"),
        (no_loop, "an epoch without a loop over session.batches"),
        (two_lengths, "a length given within a loop over session.epochs"),
        (last_batch_unused, "was not called for the batch of update 5"),
        (updates_in_epochs, "session.updates: called after another loop"),
        (shares(5), r"a batch of \[5\] rows given; expected arrays or tensors of 4 rows each"),
        (loss_after_gradients, r"called after optimizer.gradients\(\)"),
        (shared_outside, "called outside of a loop over session.updates"),
        (in_batch(lambda optimizer, loss: optimizer.gradients(loss)), "write session.prepare\\(..., overlap=False\\)"),
    ],
)
def test_a_loop_that_cannot_be_followed_is_refused(misuse, sentence):
    with pytest.raises(ScriptError, match=sentence), mtrain.session() as session:
        misuse(session, *prepared(session, overlap=misuse is not loss_after_gradients))


# --------------------------------------------------------------------------------------------- gradients of each loss
def test_the_gradient_of_each_loss_is_shown_alone_and_their_sum_is_used():
    seen = []
    with mtrain.session() as session:
        model, optimizer = prepared(session, overlap=False)
        for x, _ in session.batches(LOADER, updates=2):
            output, parameters = model(x), list(model.parameters())
            one, other = output[:, 0].square().mean(), output.mean()
            expected = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (one, other)]
            own = [optimizer.gradients(loss, retain_graph=True) for loss in (one, other)]
            total = optimizer.gradients()
            for place, name in enumerate(("weight", "bias")):
                assert torch.equal(own[0][name], expected[0][place])
                assert torch.equal(own[1][name], expected[1][place])
                assert torch.equal(total[name], expected[0][place] + expected[1][place])
            model.bias.grad = torch.full_like(model.bias, 2.0)  # as a plain loop sets it
            before = model.bias.detach().clone()
            optimizer.step()
            assert torch.allclose(before - model.bias, torch.tensor(0.2))
            seen.append(optimizer.norm)
    assert len(seen) == 2


def test_a_parameter_that_a_loss_does_not_reach_has_a_gradient_of_zero_there():
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: torch.nn.ModuleList([torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)]),
            optimizer=mtrain.SGD(learning_rate=0.1),
            overlap=False,
        )
        for x, _ in session.batches(LOADER, updates=1):
            first = optimizer.gradients(model[0](x).mean())
            second = optimizer.gradients(model[1](x).mean())
            assert list(first) == [name for name, _ in model.named_parameters()]
            assert not first["1.weight"].any()
            assert not second["0.weight"].any()
            assert torch.equal(optimizer.gradients()["0.weight"], first["0.weight"])
            optimizer.step()


def test_a_first_update_that_the_script_leaves_out_is_reported():
    with mtrain.session() as session:
        model, optimizer = prepared(session, overlap=False)
        for number, batch in enumerate(session.batches(LOADER, updates=2)):
            optimizer.backward(loss_of(model, batch))
            optimizer.step() if number else optimizer.skip()
    assert list(optimizer.rates.learning_rates) == [0.1]


# ------------------------------------------------------------------------------------------------------ several ranks
TWO = ("-b", "ddp", "--nproc-per-node", "2")


@pytest.mark.job
@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("own-batch", "session.share: the ranks have made different batches; make the same one on every rank"),
        ("own-skip", "optimizer.skip: ranks 1 of 2 have left out update 1, which the others have made"),
    ],
)
def test_a_rank_that_decides_alone_is_told(mistake, sentence, tmp_path):
    result = run(tmp_path, *TWO, str(SCRIPTS / "train_own_loops.py"), mistake)
    assert result.returncode == 2, result.stdout + result.stderr
    assert sentence in result.stderr
