"""``train.quantise``: what layers compute, when they begin, what is saved, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import Quantise, Recipe, State
from mtrain.errors import SpecError
from mtrain_kit import training
from mtrain_kit.convnet import build, start_weights
from mtrain_kit.training import Case
from tests.framework import Framework

CASE = Case(quantised=True)
RANGES = ["conv1.input_range", "conv2.input_range", "head.input_range"]
Arrays = dict[str, Any]


def recipe(**fields: Any) -> Recipe:
    return replace(CASE.recipe(1), **fields)


def trained(session: Any, chosen: Recipe, *, updates: int) -> list[State]:
    """The states after each update."""
    model, optimizer = training.start_training(session, chosen)
    batches = training.batches_of(session, CASE, updates=updates)
    states = []
    for update in range(updates):
        training.update_once(session, model, optimizer, batches, CASE, update)
        states.append(session.state(model, optimizer))
    return states


def ranges(state: State) -> list[list[float]]:
    return [state.weights[name].tolist() for name in RANGES]


def logits(session: Any, model: Any) -> Any:
    model.eval()
    (batch,) = session.batches([training.image_batch(4)])
    found = session.infer(model, batch)["logits"]
    model.train()
    return found


def test_ranges_are_observed_from_start_to_freeze(framework: Framework) -> None:
    with framework.solo() as session:
        states = trained(session, recipe(quantise=Quantise(start=2, freeze=4)), updates=6)
    unset = [[0.0, 0.0]] * 3
    assert [ranges(state) == unset for state in states] == [True, True, False, False, False, False]
    assert ranges(states[2]) != ranges(states[3]) == ranges(states[4]) == ranges(states[5])
    assert all(low <= 0 < high for low, high in ranges(states[5]))


def test_a_range_is_a_moving_average_of_smallest_and_largest_inputs(framework: Framework) -> None:
    images = [batch["images"] for batch in training.micro_batches(CASE, rank=0, size=1, updates=2)]
    with framework.solo() as session:
        first, second = (state.weights[RANGES[0]] for state in trained(session, recipe(quantise=Quantise()), updates=2))
    bounds = np.asarray([[x.min(), x.max()] for x in images])
    np.testing.assert_allclose(first, bounds[0], rtol=1e-15)
    np.testing.assert_allclose(second, 0.9 * bounds[0] + 0.1 * bounds[1], rtol=1e-14)


def test_until_the_first_range_is_set_training_is_that_without_rounding(framework: Framework) -> None:
    with framework.solo() as session:
        plain = trained(session, recipe(quantise=None), updates=4)
        rounded = trained(session, recipe(quantise=Quantise(start=2)), updates=4)
    for update, same in enumerate((True, True, True, False)):
        ours = {name: x for name, x in rounded[update].weights.items() if name not in RANGES}
        assert (not training.differing_names(plain[update].weights, ours)) == same


def test_a_layer_computes_with_8_bit_weights_and_inputs(framework: Framework) -> None:
    with framework.solo() as session:
        model, optimizer = training.start_training(session, recipe(quantise=Quantise()))
        weights = {**start_weights(), **{name: np.asarray([-0.2, 0.4]) for name in RANGES}}
        session.restore(model, optimizer, State(weights=weights))
        inputs = np.random.default_rng(0).normal(0, 0.3, (5, 8))
        found = framework.ops.to_numpy(model.head(framework.tensor(inputs)))
    scale = 0.6 / 255
    zero = np.round(0.2 / scale)
    x = ((np.round(inputs / scale) + zero).clip(0, 255) - zero) * scale
    scales = np.abs(weights["head.weight"]).max(1, keepdims=True) / 127
    weight = np.round(weights["head.weight"] / scales) * scales
    np.testing.assert_allclose(found, x @ weight.T + weights["head.bias"], rtol=1e-12)


def test_memory_layouts_compute_the_same(framework: Framework) -> None:
    with framework.solo() as session:
        last, first = (trained(session, recipe(channels_last=way), updates=4)[-1] for way in (True, False))
    assert max(training.differences(training.flat(last), training.flat(first)).values()) <= 1e-11


def test_a_resumed_job_ends_with_the_same_bits(framework: Framework) -> None:
    with framework.solo() as session:
        states = trained(session, recipe(), updates=6)
        model, optimizer = session.prepare(build, recipe())
        session.restore(model, optimizer, states[2])
        batches = training.batches_of(session, CASE, start=3, updates=6)
        for update in range(3, 6):
            training.update_once(session, model, optimizer, batches, CASE, update)
        assert training.differing_names(training.flat(states[5]), training.flat(session.state(model, optimizer))) == []


def test_averaged_weights_are_evaluated_with_the_ranges_of_the_last_update(framework: Framework) -> None:
    with framework.solo() as session:
        state = trained(session, recipe(), updates=5)[-1]
        assert [name for name in RANGES if name in state.ema] == []
        model, optimizer = session.prepare(build, recipe())
        session.restore(model, optimizer, state)
        with optimizer.averaged():
            averaged = logits(session, model)
        # Without counters, as an evaluation of plain weights does it.
        model, optimizer = session.prepare(build, recipe())
        session.restore(model, optimizer, State(weights={**state.weights, **state.ema}))
        np.testing.assert_array_equal(logits(session, model), averaged)
        unset = {name: np.zeros(2) for name in RANGES}
        session.restore(model, optimizer, State(weights={**state.weights, **state.ema, **unset}))
        assert np.abs(logits(session, model) - averaged).max() > 1e-4


def test_weights_with_and_without_ranges_fit_models_without_and_with(framework: Framework) -> None:
    with framework.solo() as session:
        with_ranges = trained(session, recipe(), updates=3)[-1]
        without = {name: x for name, x in with_ranges.weights.items() if name not in RANGES}
        for chosen, given in ((recipe(quantise=None), with_ranges.weights), (recipe(), without)):
            model, optimizer = session.prepare(build, chosen)
            session.restore(model, optimizer, State(weights=given))
            held = session.state(model, optimizer).weights
            assert training.differing_names(without, {name: x for name, x in held.items() if name not in RANGES}) == []
            assert all(not held[name].any() for name in RANGES if name in held)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"own_model": True}, "layers of its neutral models only"),
        ({"quantise": Quantise(exclude=("neck",))}, "'neck' is found in no layer's name; they are like conv1"),
        ({"quantise": Quantise(exclude=("conv", "head"))}, "leaves no layer to round"),
    ],
)
def test_what_cannot_be_rounded_is_refused(framework: Framework, fields: Any, message: str) -> None:
    with framework.solo() as session, pytest.raises(SpecError, match=message):
        session.prepare(build, recipe(**fields))


def test_excluded_layers_are_left_alone(framework: Framework) -> None:
    with framework.solo() as session:
        state = trained(session, recipe(quantise=Quantise(exclude=("^head$",))), updates=2)[-1]
    assert [name for name in state.weights if name in RANGES] == RANGES[:2]
