"""BatchNorm under torch against float64: output, gradients and running statistics, in every memory layout."""

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from mtrain.backends._torch import nn as ours
from mtrain.backends._torch import syncbn
from mtrain.backends.engine import LocalCollective

CHANNELS = 16
EXACT = 5e-7
"""Relative error that rounding of single elements explains; torch's own kernel has 2e-5 to 3e-4 here."""


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": channels_last,
    "slice of channels_last": lambda x: channels_last(torch.cat([x, x], 1))[:, :CHANNELS],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


def relative(result: Tensor, expected: Tensor) -> float:
    expected = expected.detach()
    return float((result.detach().double() - expected).norm() / expected.norm())


def layer(kind: type[nn.BatchNorm2d] = ours.BatchNorm2d) -> nn.BatchNorm2d:
    generator = torch.Generator().manual_seed(1)
    made = kind(CHANNELS, eps=1e-3, momentum=0.03)
    with torch.no_grad():
        made.weight.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
        made.bias.copy_(torch.randn(CHANNELS, generator=generator))
    return made


def learnt(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output, gradients and statistics of one training step."""
    x = x.detach().requires_grad_()
    y = module(x)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    return {"output": y, "input": grads[0], **dict(zip(names, grads[1:], strict=True)), **dict(module.named_buffers())}


def images(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    # A gradient that leans on the input, as in training: its two sums over the pixels do not vanish.
    return deviation * x + mean, dy + 0.3 * x + 0.2


def exact(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    return learnt(copy.deepcopy(module).double(), x.double().contiguous(), dy.double().contiguous())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(2, CHANNELS, 160, 160), (3, CHANNELS, 37, 31), (2, CHANNELS, 8, 8), (1, CHANNELS, 1, 1031)]
)
def test_a_training_step_of_batchnorm_is_that_of_float64(layout: str, shape: tuple[int, ...]) -> None:
    x, dy = images(*shape)
    module = layer()
    expected = exact(module, x, dy)
    actual = learnt(module, LAYOUTS[layout](x), LAYOUTS[layout](dy))
    errors = {name: relative(actual[name], expected[name]) for name in expected if name != "num_batches_tracked"}
    # torch adds the weight's gradient up in float32 in contiguous tensors.
    bounds = {"weight": 5e-6, "running_mean": 1e-6}
    assert {name: error for name, error in errors.items() if error > bounds.get(name, EXACT)} == {}
    assert int(actual["num_batches_tracked"]) == 1


def test_a_mean_far_from_zero_costs_channels_last_no_more_than_it_costs_a_contiguous_input() -> None:
    x, dy = images(4, CHANNELS, 160, 160, mean=3.0, deviation=0.1)
    expected = exact(layer(), x, dy)
    last, contiguous = learnt(layer(), channels_last(x), channels_last(dy)), learnt(layer(), x, dy)
    for name in ("output", "input", "weight", "running_var"):
        assert relative(last[name], expected[name]) <= 2 * relative(contiguous[name], expected[name]) + EXACT, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_keeps_its_type_and_float32_statistics(dtype: torch.dtype) -> None:
    x, dy = (channels_last(each).to(dtype) for each in images(4, CHANNELS, 80, 80))
    expected = exact(layer(), x, dy)
    actual = learnt(layer(), x, dy)
    assert actual["output"].dtype == actual["input"].dtype == dtype
    assert actual["running_var"].dtype == actual["weight"].dtype == torch.float32
    assert relative(actual["running_var"], expected["running_var"]) < EXACT
    assert relative(actual["bias"], expected["bias"]) < EXACT
    assert relative(actual["output"], expected["output"]) < torch.finfo(dtype).eps


def test_float64_is_exact_to_rounding() -> None:
    x, dy = (each.double() for each in images(4, CHANNELS, 160, 160))
    module = layer().double()
    expected = exact(module, x, dy)
    actual = learnt(module, channels_last(x), channels_last(dy))
    assert all(relative(actual[name], expected[name]) < 1e-14 for name in ("output", "input", "weight", "bias"))


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_running_variance_takes_the_estimate_that_was_asked_for(unbiased: bool, layout: str) -> None:
    x, _ = images(4, CHANNELS, 20, 20)
    module = ours.BatchNorm2d(CHANNELS, momentum=1.0, unbiased_variance=unbiased)
    module(LAYOUTS[layout](x))
    expected = x.double().var((0, 2, 3), correction=int(unbiased))
    assert relative(module.running_var, expected) < EXACT


def test_evaluation_uses_the_running_statistics_in_the_bits_of_torch() -> None:
    x, _ = images(4, CHANNELS, 40, 40)
    module, native = layer().eval(), layer(nn.BatchNorm2d).eval()
    assert torch.equal(module(channels_last(x)), native(channels_last(x)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batchnorm_over_ranks_is_as_exact_as_that_of_one(layout: str) -> None:
    x, dy = images(4, CHANNELS, 80, 80)
    halves = [LAYOUTS[layout](half) for half in (x[:2], x[2:])]
    net = nn.Sequential(layer())
    expected = exact(net, x, dy)
    syncbn.synchronize(net, _TwoHalves(halves[1], LAYOUTS[layout](dy[2:])))
    actual = learnt(net, halves[0], LAYOUTS[layout](dy[:2]))
    assert relative(actual["output"], expected["output"][:2]) < EXACT
    assert relative(actual["input"], expected["input"][:2]) < EXACT
    assert relative(actual["0.running_var"], expected["0.running_var"]) < EXACT


class _TwoHalves(LocalCollective):
    """Rank 0 of two; what rank 1 sends is worked out in float64."""

    size = 2

    def __init__(self, x: Tensor, dy: Tensor) -> None:
        self._x, self._dy = x.double(), dy.double()
        self._sent: Tensor | None = None

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        flat = self._x.transpose(0, 1).flatten(1)
        other = torch.cat([flat.mean(1), flat.var(1, correction=0), flat.new_tensor([flat.shape[1]])]).to(x.dtype)
        self._gathered = torch.stack([x, other])
        return self._gathered

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        means, variances = self._gathered[:, :CHANNELS], self._gathered[:, CHANNELS:-1]
        mean = means.mean(0)
        var = (variances + (means - mean).square()).mean(0)
        xhat = (self._x - mean.view(1, -1, 1, 1)) / (var + 1e-3).sqrt().view(1, -1, 1, 1)
        return x + torch.stack([self._dy.sum((0, 2, 3)), (self._dy * xhat).sum((0, 2, 3))]).to(x.dtype)


def test_a_batchnorm_of_torch_in_the_model_of_a_plugin_is_made_exact() -> None:
    net = nn.Sequential(layer(nn.BatchNorm2d))
    syncbn.make_exact(net)
    x, dy = images(4, CHANNELS, 160, 160)
    assert relative(learnt(net, channels_last(x), channels_last(dy))["output"], exact(net, x, dy)["output"]) < EXACT
