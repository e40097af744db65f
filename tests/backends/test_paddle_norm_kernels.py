"""mtrain's own kernels under Paddle: BatchNorm with and without SiLU against float64, and when they are left out."""

import copy
from collections.abc import Mapping

import numpy as np
import pytest

from mtrain.backends._kernels import library
from mtrain.backends._paddle import nn as ours
from mtrain.backends._paddle import paddle, syncbn
from mtrain.core.interfaces import Array, Recipe
from tests.backends.compiler import needs_a_compiler
from tests.framework import Framework

EXACT = 1e-6
"""Relative to the largest value of an array; two to ten units in the last place of float32."""


@needs_a_compiler
def test_the_kernels_are_used_where_there_is_a_compiler() -> None:
    assert library.load_planes().kernels is not None, library.load_planes().reason


def layer(channels: int, *, silu: bool = True, own: bool = True) -> ours.BatchNorm2d:
    generator = np.random.default_rng(1)
    made = ours.BatchNorm2d(channels, eps=1e-3, momentum=0.03, silu=silu)
    made.weight.set_value(generator.uniform(0.5, 1.5, channels).astype(np.float32))
    made.bias.set_value(generator.standard_normal(channels).astype(np.float32))
    made.kernels = own
    return made


def images(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> tuple[Array, Array]:
    generator = np.random.default_rng(0)
    x, dy = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
    return x * np.float32(deviation) + np.float32(mean), dy


def learnt(module: paddle.nn.Layer, x: paddle.Tensor, dy: paddle.Tensor) -> dict[str, Array]:
    """Output, gradients and statistics of one training step."""
    x = x.detach()
    x.stop_gradient = False
    y = module(x)
    paddle.autograd.backward([y], [dy])
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    results = {"output": y.detach(), "input": x.grad, **named, **dict(module.named_buffers())}
    return {name: np.asarray(tensor.numpy()) for name, tensor in results.items()}


def exactly(module: paddle.nn.Layer, x: Array, dy: Array) -> dict[str, Array]:
    """The same in float64."""
    return learnt(copy.deepcopy(module).to(dtype="float64"), *(paddle.to_tensor(each.astype("f8")) for each in (x, dy)))


def errors(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, float]:
    return {
        name: float(np.abs(actual[name] - value).max() / max(np.abs(value).max(), 1e-3))
        for name, value in expected.items()
        if "tracked" not in name
    }


@needs_a_compiler
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(2, 16, 160, 160), (3, 16, 37, 31), (2, 3, 8, 8), (1, 7, 1, 1031), (2, 300, 5, 1), (5, 20, 1, 1), (1, 20, 70, 60)],
)
def test_a_training_step_is_that_of_float64(shape: tuple[int, ...], silu: bool) -> None:
    x, dy = images(*shape, mean=0.5)
    module = layer(shape[1], silu=silu)
    expected = exactly(module, x, dy)
    actual = learnt(module, paddle.to_tensor(x), paddle.to_tensor(dy))
    assert {name: error for name, error in errors(actual, expected).items() if error > EXACT} == {}
    assert int(actual["num_batches_tracked"]) == 1


@needs_a_compiler
def test_gradients_and_inputs_that_are_views_are_taken_in_the_order_of_their_shape() -> None:
    x, dy = images(2, 4, 6, 5)
    module = layer(4)
    expected = exactly(module, x, dy)
    turned = [paddle.to_tensor(each.swapaxes(2, 3).copy()).transpose([0, 1, 3, 2]) for each in (x, dy)]
    assert max(errors(learnt(module, *turned), expected).values()) < EXACT


@needs_a_compiler
def test_the_kernels_are_at_least_as_exact_as_those_of_paddle() -> None:
    x, dy = images(4, 16, 160, 160, mean=3.0, deviation=0.1)
    expected = exactly(layer(16), x, dy)
    given = [paddle.to_tensor(each) for each in (x, dy)]
    own, native = (errors(learnt(layer(16, own=each), *given), expected) for each in (True, False))
    assert {name: (own[name], native[name]) for name in own if own[name] > max(1.2 * native[name], 2e-7)} == {}


@needs_a_compiler
def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [paddle.to_tensor(each) for each in images(3, 24, 67, 71)]
    results = []
    for count in ("1", "2", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        results.append(learnt(layer(24), *given))
    for other in results[1:]:
        assert all(np.array_equal(results[0][name], other[name]) for name in other)


@needs_a_compiler
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    x, dy = images(2, 8, 20, 20)
    x[1, 3, 7, 5] = value
    result = learnt(layer(8), paddle.to_tensor(x), paddle.to_tensor(dy))
    assert np.isnan(result["output"][:, 3]).all()
    assert np.isnan(result["input"][:, 3]).all()
    assert np.isfinite(result["output"][:, 4]).all()


@needs_a_compiler
def test_what_needs_no_gradient_gets_none() -> None:
    x, dy = images(2, 8, 9, 9)
    module = layer(8)
    y = module(paddle.to_tensor(x))
    paddle.autograd.backward([y], [paddle.to_tensor(dy)])
    assert module.weight.grad is not None
    frozen = layer(8)
    frozen.bias.stop_gradient = True
    result = exactly(layer(8), x, dy)
    variable = paddle.to_tensor(x, stop_gradient=False)
    paddle.autograd.backward([frozen(variable)], [paddle.to_tensor(dy)])
    assert frozen.bias.grad is None
    assert max(errors({"input": variable.grad.numpy()}, {"input": result["input"]}).values()) < EXACT


@pytest.mark.parametrize("choice", ["auto", "framework"])
def test_a_job_uses_the_kernels_that_the_spec_asks_for(framework: Framework, choice: str) -> None:
    recipe = Recipe(rule="sgd", groups=(("", {}),), micro_batch=2, channels_last=True, kernels=choice)
    with framework.solo() as session:
        model, _ = session.prepare(lambda: paddle.nn.Sequential(paddle.nn.Conv2D(3, 8, 3), layer(8, own=False)), recipe)
        expected = choice == "auto" and library.load_planes().kernels is not None
        assert model[1].kernels is expected
        output = model(paddle.ones([2, 3, 9, 9]))
    assert ("Normalize" in output.grad_fn.name()) is expected


def test_kernels_that_another_rank_lacks_are_not_used(
    framework: Framework, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Recipe(rule="sgd", groups=(("", {}),), micro_batch=2, channels_last=True)

    def gather(mine: object) -> list[object]:
        return [mine, "there is no C compiler (cc)"] if isinstance(mine, str) else [mine]

    with framework.solo() as session:
        monkeypatch.setattr(session.collective, "all_gather", gather)
        model, _ = session.prepare(lambda: paddle.nn.Sequential(layer(8, own=False)), recipe)
    assert model[0].kernels is False
    assert "train.kernels: BatchNorm is Paddle's" in caplog.text
    assert "there is no C compiler (cc)" in caplog.text


def test_frozen_layers_and_evaluation_apply_silu_too() -> None:
    x = paddle.to_tensor(images(2, 8, 20, 20)[0])
    plain = layer(8, silu=False)
    plain.eval()
    expected = paddle.nn.functional.silu(plain(x)).numpy()
    net = paddle.nn.Sequential(layer(8))
    net[0].weight.stop_gradient = True
    syncbn.freeze(net)
    net.train()
    assert np.array_equal(net(x).numpy(), expected)
    net.eval()
    assert np.array_equal(net(x).numpy(), expected)


@needs_a_compiler
def test_a_gradient_of_a_gradient_is_refused() -> None:
    x, _ = (paddle.to_tensor(array) for array in images(2, 3, 4, 4))
    x.stop_gradient = False
    with pytest.raises(Exception, match=r"create_graph=True.* write train.kernels: framework"):
        paddle.grad(layer(3)(x).sum(), x, create_graph=True)
