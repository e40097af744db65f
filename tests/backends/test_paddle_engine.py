"""Properties of the Paddle engine alone: kernels, memory shared by many tensors, refusals."""

import math
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mtrain.backends._paddle import internals, ops, paddle, state
from mtrain.backends._paddle.flat import Flat
from mtrain.core.interfaces import Rates
from mtrain.errors import SpecError
from tests.backends.recipes import recipe, update
from tests.contract.convnet import build


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_on_the_cpu_is_refused_before_the_model_is_built(session: Any, precision: str) -> None:
    with pytest.raises(SpecError, match=rf"train\.precision: {precision} was given.*use fp32"):
        session.prepare(lambda: pytest.fail("built"), recipe(precision=precision))


def test_compiling_is_refused_before_the_model_is_built(session: Any) -> None:
    with pytest.raises(SpecError, match=r"set train\.compile: false"):
        session.prepare(lambda: pytest.fail("built"), recipe(compile=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_norm_is_exact_for_many_numbers(dtype: str) -> None:
    numbers = np.random.default_rng(0).normal(size=4_000_000).astype(dtype)
    expected = math.sqrt(float(np.square(numbers, dtype=np.float64).sum()))
    actual = float(internals.norm([paddle.to_tensor(part) for part in np.split(numbers, 4)]))
    assert actual == pytest.approx(expected, rel=1e-6 if dtype == "float32" else 1e-13)


def test_the_norm_of_nothing_is_0_and_of_what_is_not_finite_is_not() -> None:
    assert internals.norm([]) == 0
    assert math.isinf(internals.norm([paddle.to_tensor([1.0, -math.inf])]))
    assert math.isnan(internals.norm([paddle.to_tensor([1.0, math.nan])]))


def test_factors_are_exact_in_float64() -> None:
    x, y = paddle.to_tensor([1.0, 2.0], "float64"), paddle.to_tensor([3.0, 1e-3], "float64")
    internals.add_(x, 0.1, y)
    assert x.tolist() == [1.0 + 0.1 * 3.0, 2.0 + 0.1 * 1e-3]


def test_flat_tensors_stay_themselves_and_share_one_buffer() -> None:
    tensors = {
        "a": paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]]),
        "scalar": paddle.to_tensor(5.0),
        "b": paddle.to_tensor([6.0]),
    }
    flat = Flat(tensors)
    assert flat.buffer.tolist() == [1, 2, 3, 4, 5, 6]
    flat.span(1, 3).scale_(10.0)
    assert tensors["a"].tolist() == [[1, 2], [3, 4]]
    assert (tensors["scalar"].tolist(), tensors["b"].tolist()) == (50, [60])
    paddle.assign(paddle.ones([2, 2]), tensors["a"])
    assert flat.buffer.tolist() == [1, 1, 1, 1, 50, 60]
    other = flat.copy()
    other.buffer.scale_(0.0)
    assert flat.buffer.tolist() == [1, 1, 1, 1, 50, 60]
    flat.check()


def test_a_weight_that_was_moved_away_is_noticed_at_the_first_update(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe())
    paddle.zeros_like(model.head.bias)._share_buffer_to(model.head.bias)
    with pytest.raises(AssertionError, match=r"head\.bias was given memory of its own"):
        update(session, model, optimizer, Rates(learning_rates=(0.1, 0.1)))


def test_weights_set_by_paddles_own_means_are_what_is_trained(session: Any) -> None:
    model, optimizer = session.prepare(build, recipe(ema_decay=0.9))
    model.conv1.weight.set_value(np.full((6, 3, 3, 3), 0.5))
    model.head.set_state_dict({"weight": np.zeros((4, 8)), "bias": np.full(4, 7.0)})
    update(session, model, optimizer, Rates(learning_rates=(1e-9, 1e-9)))
    weights = session.state(model, optimizer).weights
    assert np.allclose(weights["conv1.weight"], 0.5, atol=1e-6)
    assert np.allclose(weights["head.bias"], 7, atol=1e-6)
    assert np.allclose(weights["head.weight"], 0, atol=1e-6)


@pytest.mark.parametrize("read", [state.to_numpy, ops.to_numpy])
def test_a_tensor_within_a_buffer_is_read_without_the_rest_of_it(read: Callable[[Any], Any]) -> None:
    buffer = paddle.arange(16_000_000, dtype="float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    part = read(buffer[1000:1003])
    # A copy of the buffer would touch 64 MB of new memory.
    touched = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
    assert part.tolist() == [1000.0, 1001.0, 1002.0]
    assert touched < 16_000_000
