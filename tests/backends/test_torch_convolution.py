"""mtrain's kernel for the gradient of a convolution's weight: its result, and which convolutions use it."""

import pytest
import torch
from torch import Tensor, nn

from mtrain.backends._kernels import library
from mtrain.backends._torch import convolution
from mtrain.backends._torch.convolution import KernelConv2d
from mtrain.backends.solo import Solo
from mtrain.core.interfaces import Recipe

pytestmark = pytest.mark.skipif(library.load_convolution().kernels is None, reason="no C compiler")
AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
SHAPES = [
    # inputs, outputs, height, width, side, stride, padding
    (3, 16, 64, 64, 6, 2, 2),
    (16, 32, 40, 40, 3, 2, 1),
    (64, 64, 20, 20, 3, 1, 1),
    (5, 21, 9, 7, 3, 1, 0),
    (4, 40, 9, 400, 5, 1, 2),
    (7, 2, 9, 9, 3, 2, 1),
]


@pytest.fixture(autouse=True)
def _one_thread_and_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def pair(inputs: int, outputs: int, side: int, stride: int, padding: int) -> tuple[nn.Module, nn.Module]:
    """Two equal layers, torch's and mtrain's."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(inputs, outputs, side, stride, padding, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    convolution.use_kernels(layers[1])
    assert type(layers[1]) is KernelConv2d
    return layers[0], layers[1]


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    y = layer(x)
    (y * torch.sin(torch.arange(y.numel())).reshape(y.shape)).sum().backward()
    assert x.grad is not None
    return [x.grad, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_float64_and_with_avx2_the_bits_of_torch(shape: tuple[int, ...]) -> None:
    inputs, outputs, height, width, side, stride, padding = shape
    theirs, own = pair(inputs, outputs, side, stride, padding)
    x = torch.randn(3, inputs, height, width).contiguous(memory_format=torch.channels_last)
    ours = gradients(own, x)
    if AVX2:
        assert all(torch.equal(a, b) for a, b in zip(ours, gradients(theirs, x), strict=True))
    exact = gradients(theirs.double(), x.double())
    for ours_one, exact_one in zip(ours, exact, strict=True):
        torch.testing.assert_close(ours_one.double(), exact_one, rtol=1e-4, atol=2e-3)


def test_the_gradient_has_the_layout_of_the_weight() -> None:
    _, own = pair(8, 16, 3, 1, 1)
    _, grad = gradients(own, torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last))
    assert grad.stride() == next(own.parameters()).stride()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, bias=False)


@pytest.mark.parametrize(("kernels", "kind"), [("auto", KernelConv2d), ("framework", nn.Conv2d)])
def test_a_session_uses_it_unless_the_frameworks_kernels_are_asked_for(kernels: str, kind: type[nn.Module]) -> None:
    group = ("", {"momentum": 0.9, "weight_decay": 0.0, "nesterov": 0.0})
    recipe = Recipe(rule="sgd", groups=(group,), micro_batch=2, channels_last=True, kernels=kernels)
    with Solo(Solo.Options(device="cpu", framework="torch")) as session:
        model, _ = session.prepare(Net, recipe)
        assert [type(module) for module in model.modules()] == [Net, kind]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 1, bias=False),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Conv2d(4, 4, 3, dilation=2, bias=False),
        nn.Conv2d(4, 4, (3, 5), bias=False),
        nn.Conv2d(4, 4, 3, padding="same", bias=False),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", bias=False),
    ],
)
def test_other_convolutions_stay_as_they_are(layer: nn.Module) -> None:
    convolution.use_kernels(layer)
    assert type(layer) is nn.Conv2d


def test_other_processors_keep_the_kernels_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    layer = nn.Conv2d(4, 4, 3, bias=False)
    convolution.use_kernels(layer)
    assert type(layer) is nn.Conv2d


@pytest.mark.parametrize("why", ["threads", "layout", "type", "autocast", "small images"])
def test_torch_computes_what_does_not_fit(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, own = pair(4, 8, 3, 1, 1)
    monkeypatch.setattr(convolution._Convolution, "apply", lambda *_: pytest.fail("the kernel was used"))
    x = torch.randn(2, 4, *((3, 3) if why == "small images" else (6, 6)))
    if why != "layout":
        x = x.contiguous(memory_format=torch.channels_last)
    if why == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    if why == "type":
        x, theirs, own = x.double(), theirs.double(), own.double()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=why == "autocast"):
        torch.testing.assert_close(gradients(own, x), gradients(theirs, x), rtol=0, atol=0)
