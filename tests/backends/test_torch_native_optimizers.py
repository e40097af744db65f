"""A user's own optimizer of torch: the bits of a plain loop, also when its state was saved and restored."""

import numpy as np
import pytest
import torch

from mtrain.backends._torch.engine import of_one_rank
from mtrain.core.interfaces import Rates, Recipe
from mtrain.errors import CheckpointError, SpecError

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "dampening": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adadelta": {},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "ASGD": {},
    "Rprop": {},
}
UPDATES = 6


class Counting(torch.optim.Optimizer):
    """An optimizer whose state has numbers, as those of other libraries have."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    state["scale"] = state.get("scale", 1.0) * 0.9
                    parameter.add_(parameter.grad, alpha=-group["lr"] * state["scale"] / state["step"])


class Switching(torch.optim.SGD):
    """An optimizer that evaluates with other weights than it trains, and whose way back is not exact."""

    def eval(self):
        self._scale(1 / 3)

    def train(self):
        if self.state.get("evaluates"):
            self._scale(3)

    @torch.no_grad()
    def _scale(self, factor):
        self.state["evaluates"] = factor < 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)


class Network(torch.nn.Module):
    """A network one of whose layers is never used, so that its weights have no state."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        self.never = torch.nn.Linear(2, 2)

    def forward(self, inputs):
        return self.body(inputs)


def network():
    torch.manual_seed(3)
    return Network()


def loss_of(model, update):
    inputs = np.random.default_rng(update).normal(size=(4, 5)).astype(np.float32)
    return model(torch.from_numpy(inputs)).square().mean()


def maker(name):
    if name == "Counting":
        return lambda model: Counting(model.parameters(), lr=0.05)
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.05, **OPTIMIZERS[name])


def plain(name):
    model = network()
    optimizer = maker(name)(model)
    for update in range(UPDATES):
        optimizer.zero_grad()
        loss_of(model, update).backward()
        optimizer.step()
    return model


def prepared(make):
    session = of_one_rank(torch.device("cpu"))
    recipe = Recipe(rule="sgd", groups=[("", {})], micro_batch=4, native_optimizer=make, own_model=True)
    return session, *session.prepare(network, recipe)


def trained(model, optimizer, updates):
    for update in updates:
        with optimizer.micro_batch(last=True):
            optimizer.backward(loss_of(model, update))
        optimizer.step(Rates(learning_rates=[0.05]))


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Counting"])
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
        assert torch.equal(one, other)


def test_the_moments_of_another_optimizer_are_refused():
    session, model, optimizer = prepared(maker("Adam"))
    trained(model, optimizer, range(1))
    saved = session.state(model, optimizer)
    recipe = Recipe(rule="sgd", groups=[("", {})], micro_batch=4, own_model=True)
    model, optimizer = session.prepare(network, recipe)
    with pytest.raises(CheckpointError, match="optimizer moments"):
        session.restore(model, optimizer, saved)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda model: 3, "returned a int"),
        (lambda model: torch.optim.SGD([torch.zeros(1)], lr=0.1), "are not those of the model"),
        (lambda model: torch.optim.LBFGS(model.parameters()), r"several times per update; write .*overlap=False"),
    ],
)
def test_what_is_no_usable_optimizer_is_refused(make, sentence):
    with pytest.raises(SpecError, match=sentence):
        prepared(make)


def test_an_optimizer_with_two_modes_evaluates_in_the_second_and_trains_on_with_the_same_bits():
    session, model, optimizer = prepared(lambda model: Switching(model.parameters(), lr=0.05))
    trained(model, optimizer, range(3))
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    with optimizer.averaged():
        assert all(torch.equal(x, before[name] * (1 / 3)) for name, x in model.named_parameters())
    saved = session.state(model, optimizer)
    assert all(torch.equal(x, before[name]) for name, x in model.named_parameters())
    assert all(np.array_equal(saved.ema[name], x * (1 / 3)) for name, x in before.items())
    assert any(not torch.equal(x * (1 / 3) * 3, x) for x in before.values()), "the way back is not exact"


def test_an_average_beside_an_optimizer_with_two_modes_is_refused():
    recipe = Recipe(
        rule="sgd",
        groups=[("", {})],
        micro_batch=4,
        native_optimizer=lambda model: Switching(model.parameters(), lr=0.05),
        own_model=True,
        ema_decay=0.9,
    )
    with pytest.raises(SpecError, match="leave ema out"):
        of_one_rank(torch.device("cpu")).prepare(network, recipe)
