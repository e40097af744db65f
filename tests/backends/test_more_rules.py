"""The rules beside sgd and adam, on every framework, for 30 updates in float64, against numpy as their papers state them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import Rates, Recipe, State
from mtrain.core.update.recipe import MOMENTS
from tests.framework import Framework

UPDATES, SHAPES = 30, {"matrix": (4, 3, 3, 3), "vector": (7,), "spare": (2, 5)}
OPTIONS: Mapping[str, Mapping[str, float]] = {
    "lion": {"beta1": 0.9, "beta2": 0.98},
    "rmsprop": {"momentum": 0.8, "beta2": 0.95, "eps": 1e-7},
    "lamb": {"beta1": 0.9, "beta2": 0.97, "eps": 1e-6},
}
DECAY = {"vector": 0.0, "matrix": 0.02, "spare": 0.02}
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def lion(x: Array, g: Array, m: Arrays, *, learning_rate: float, decay: float, beta1: float, **_: Any) -> Array:
    """Chen et al. 2023, algorithm 2."""
    c = beta1 * m["mean"] + (1 - beta1) * g
    m["mean"] = 0.98 * m["mean"] + (1 - 0.98) * g
    return x - learning_rate * (np.sign(c) + decay * x)


def rmsprop(x: Array, g: Array, m: Arrays, *, learning_rate: float, decay: float, momentum: float, **_: Any) -> Array:
    """Tieleman and Hinton 2012; the momentum of Graves 2013, as torch.optim.RMSprop adds it."""
    g = g + decay * x
    m["square"] = 0.95 * m["square"] + 0.05 * g**2
    m["momentum"] = momentum * m["momentum"] + g / (np.sqrt(m["square"]) + 1e-7)
    return x - learning_rate * m["momentum"]


def lamb(
    x: Array, g: Array, m: Arrays, *, learning_rate: float, decay: float, beta1: float, update: int, **_: Any
) -> Array:
    """You et al. 2020, algorithm 2."""
    m["mean"] = beta1 * m["mean"] + (1 - beta1) * g
    m["square"] = 0.97 * m["square"] + 0.03 * g**2
    r = (m["mean"] / (1 - beta1**update)) / (np.sqrt(m["square"] / (1 - 0.97**update)) + 1e-6)
    step = r + decay * x
    lengths = math.sqrt((x**2).sum()), math.sqrt((step**2).sum())
    return x - learning_rate * (lengths[0] / lengths[1] if min(lengths) > 0 else 1.0) * step


RULES: Mapping[str, Callable[..., Array]] = {"lion": lion, "rmsprop": rmsprop, "lamb": lamb}


def start() -> Arrays:
    """The start values; "vector" begins at 0, which has no length."""
    generator = np.random.default_rng(5)
    values = {name: generator.normal(size=shape) for name, shape in SHAPES.items()}
    return {**values, "vector": np.zeros(7)}


def gradients(update: int) -> Arrays:
    """The gradients of an update; "spare" takes part in every other one."""
    generator = np.random.default_rng([update, 9])
    found = {name: generator.normal(size=shape) * 10.0 ** (update % 3 - 1) for name, shape in SHAPES.items()}
    return {name: grad for name, grad in found.items() if name != "spare" or update % 2 == 0}


def rates(update: int) -> Rates:
    return Rates(learning_rates=(0.02 / (1 + update), 0.05), momentum=0.5 if update < 2 else None)


def expected(rule: str) -> tuple[Arrays, Arrays]:
    """Weights and moments after all updates."""
    weights, moments = start(), {name: {m: np.zeros(s) for m in MOMENTS[rule]} for name, s in SHAPES.items()}
    for update in range(UPDATES):
        own = rates(update)
        for name, grad in gradients(update).items():
            settings = {
                "learning_rate": own.learning_rates[0 if name == "vector" else 1],
                "decay": DECAY[name],
                "beta1": 0.9 if own.momentum is None else own.momentum,
                "momentum": 0.8 if own.momentum is None else own.momentum,
                "update": update + 1,
            }
            weights[name] = RULES[rule](weights[name], grad, moments[name], **settings)
    return weights, {f"{moment}/{name}": x for name, own in moments.items() for moment, x in own.items()}


def model_of(framework: Framework) -> Any:
    """A model whose loss has the gradients that its batch holds."""
    nn, ops = framework.nn, framework.ops

    class Model(nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            for name, shape in SHAPES.items():
                setattr(self, name, nn.parameter(shape))

        def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
            return {"total": sum(ops.sum(getattr(self, name) * batch[name]) for name in batch)}

    return Model()


def recipe(rule: str) -> Recipe:
    groups = tuple((match, {**OPTIONS[rule], "weight_decay": DECAY[match or "matrix"]}) for match in ("vector", ""))
    return Recipe(rule=rule, groups=groups, micro_batch=1, precision="fp64")  # type: ignore[arg-type]


def run(session: Any, framework: Framework, rule: str, *, cuts: tuple[int, ...] = ()) -> State:
    model, optimizer = session.prepare(lambda: model_of(framework), recipe(rule))
    session.restore(model, optimizer, State(weights=start()))
    for update in range(UPDATES):
        if update in cuts:
            saved = session.state(model, optimizer)
            model, optimizer = session.prepare(lambda: model_of(framework), recipe(rule))
            session.restore(model, optimizer, saved)
        with optimizer.micro_batch(last=True):
            optimizer.backward(model(next(session.batches([gradients(update)])))["total"])
        optimizer.step(rates(update))
    state: State = session.state(model, optimizer)
    return state


def gap(a: Arrays, b: Arrays) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max() / np.abs(a[name]).max()) for name in a)


@pytest.mark.parametrize("rule", RULES)
def test_30_updates_are_those_of_the_papers(session: Any, framework: Framework, rule: str) -> None:
    weights, moments = expected(rule)
    state = run(session, framework, rule)
    gaps = gap(weights, state.weights), gap(moments, state.moments)
    print(f"{framework.name} {rule}: weights {gaps[0]:.1e}, moments {gaps[1]:.1e}")
    assert max(gaps) <= 5e-13  # so torch and Paddle are within 1e-12 of each other


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_rule_goes_on_with_the_same_bits(session: Any, framework: Framework, rule: str) -> None:
    whole, resumed = run(session, framework, rule), run(session, framework, rule, cuts=(7,))
    for part in ("weights", "moments"):
        arrays = getattr(whole, part)
        assert all(np.array_equal(x, getattr(resumed, part)[name]) for name, x in arrays.items())
