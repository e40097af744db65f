"""Gradients of gradients through layers of mtrain's: those of torch's own layers, or refused."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from mtrain.backends._kernels import library
from mtrain.backends._torch import batchnorm, convolution, syncbn
from mtrain.backends._torch.nn import Dropout
from mtrain.errors import TrainingError
from tests.backends.compiler import needs_a_compiler
from tests.backends.test_torch_batchnorm import _TwoHalves

IMAGES = torch.randn((2, 3, 24, 24), generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 4, 3, bias=False)
    model = nn.Sequential(*layers)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def penalty(model: nn.Module) -> Sequence[Tensor]:
    """Gradients of a penalty on the gradient of the input, as WGAN-GP has it."""
    x = IMAGES.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), list(model.parameters()))


def after_a_step(model: nn.Module) -> Sequence[Tensor]:
    """Gradients of a function of the first gradients of the weights, as MAML has them."""
    weights = list(model.parameters())
    grads = torch.autograd.grad(model(IMAGES).square().sum(), weights, create_graph=True)
    return torch.autograd.grad(torch.stack([grad.square().sum() for grad in grads]).sum(), weights)


@needs_a_compiler
@pytest.mark.parametrize("find", [penalty, after_a_step])
@pytest.mark.parametrize("parts", ["kernels", "exact", "convolution"])
def test_they_are_those_of_torch(
    parts: str, find: Callable[[nn.Module], Sequence[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    theirs, ours = find(build()), build()
    if parts == "convolution":
        assert library.load_convolution().kernels is not None
        convolution.use_kernels(ours)
        assert type(ours[0]) is convolution.KernelConv2d
    else:
        syncbn.make_exact(ours)
        assert batchnorm.needs_blocks(ours[0](IMAGES))
    if parts == "kernels":
        syncbn.use_kernels(ours)
    for one, other in zip(find(ours), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4 * float(other.abs().max()))


def test_over_ranks_they_are_refused() -> None:
    x = IMAGES.clone().requires_grad_()
    weight, bias = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    y, *_ = batchnorm.normalize(x, weight, bias, eps=1e-5, collective=_TwoHalves(IMAGES, IMAGES))
    with pytest.raises(TrainingError, match=r"create_graph=True.* write train.sync_batchnorm: false"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@needs_a_compiler
def test_transforms_of_torch_func_go_through_torchs_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model, dropout = build()[:1], Dropout(0.5, name="a")
    convolution.use_kernels(model)
    keys = torch.arange(2, dtype=torch.int32)

    def loss(x: Tensor) -> Tensor:
        return (model(dropout(x, keys)) ** 2).sum()

    x = IMAGES.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(IMAGES), expected)
