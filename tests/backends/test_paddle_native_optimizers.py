"""A user's own optimizer of Paddle: the bits of a plain loop, also when its state was saved and restored."""

import numpy as np
import pytest

from mtrain.backends._paddle import paddle, rules
from mtrain.backends._paddle.engine import of_one_rank
from mtrain.core.interfaces import Rates, Recipe
from mtrain.errors import SpecError

OPTIMIZERS = {
    "SGD": {},
    "Momentum": {"momentum": 0.9, "use_nesterov": True},
    "Adam": {},
    "AdamW": {"weight_decay": 0.1},
    "Adagrad": {},
    "RMSProp": {"momentum": 0.5},
    "Adadelta": {},
    "Lamb": {},
}
UPDATES = 6


def network():
    paddle.seed(3)
    return paddle.nn.Sequential(paddle.nn.Linear(5, 7), paddle.nn.Tanh(), paddle.nn.Linear(7, 3))


def loss_of(model, update):
    inputs = np.random.default_rng(update).normal(size=(4, 5)).astype(np.float32)
    return model(paddle.to_tensor(inputs)).square().mean()


def maker(name):
    return lambda model: getattr(paddle.optimizer, name)(
        learning_rate=0.05, parameters=model.parameters(), **OPTIMIZERS[name]
    )


def plain(name):
    model = network()
    optimizer = maker(name)(model)
    for update in range(UPDATES):
        loss_of(model, update).backward()
        optimizer.step()
        optimizer.clear_grad()
    return model


def prepared(make):
    session = of_one_rank("cpu")
    recipe = Recipe(rule="sgd", groups=[("", {})], micro_batch=4, native_optimizer=make, own_model=True)
    return session, *session.prepare(network, recipe)


def trained(model, optimizer, updates):
    for update in updates:
        with optimizer.micro_batch(last=True):
            optimizer.backward(loss_of(model, update))
        optimizer.step(Rates(learning_rates=[0.05]))


# Paddle 2.6 warns of an old call of its own.
@pytest.mark.filterwarnings("ignore:Op .* is executed through:DeprecationWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_and_restored_it_trains_to_the_bits_of_a_plain_loop(name):
    session, model, optimizer = prepared(maker(name))
    trained(model, optimizer, range(3))
    saved = session.state(model, optimizer)
    session, model, optimizer = prepared(maker(name))
    session.restore(model, optimizer, saved)
    again = session.state(model, optimizer)
    assert again.moments.keys() == saved.moments.keys()
    trained(model, optimizer, range(3, UPDATES))
    for one, other in zip(model.state_dict().values(), plain(name).state_dict().values(), strict=True):
        assert (one.numpy() == other.numpy()).all()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda model: 3, "returned a int"),
        (
            lambda model: paddle.optimizer.SGD(paddle.optimizer.lr.StepDecay(0.1, 2), parameters=model.parameters()),
            "something else than mtrain sets the learning rate",
        ),
    ],
)
def test_what_is_no_usable_optimizer_is_refused(make, sentence):
    with pytest.raises(SpecError, match=sentence):
        prepared(make)


def test_muon_is_refused_by_name():
    with pytest.raises(SpecError, match=r"optimizer\.rule: muon given with Paddle; use a backend on torch"):
        rules.make("muon", None, {})
