"""``train.channels_last`` settles the memory layout of every convolution and BatchNorm, whichever way images
arrive."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtrain.backends._torch.layout import avoid_slow_kernels
from mtrain.core import nn as neutral
from mtrain.core.interfaces import Recipe
from tests.framework import Framework
from tests.models import yolov5_small

LAYOUTS = {True: torch.channels_last, False: torch.contiguous_format}


class Small(nn.Module):
    """Two convolutions on images that arrive as (B, H, W, 3), as in the shipped models."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            neutral.Conv2d(3, 8, 3, 2, 1), neutral.BatchNorm2d(8), neutral.SiLU(), neutral.Conv2d(8, 4, 1)
        )

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"total": self.body(batch["images"].float().permute(0, 3, 1, 2)).square().mean()}


def recipe(**fields: Any) -> Recipe:
    return Recipe(
        rule="sgd", groups=(("", {"momentum": 0.9, "weight_decay": 0.0, "nesterov": 0.0}),), micro_batch=2, **fields
    )


def layouts(model: nn.Module, batch: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Input of each convolution and output of each layer, by name; of those in which layouts can be told apart."""
    calls: list[tuple[str, Tensor]] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls.append((f"output of {name}", output))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.register_forward_hook(look(name))
    model(batch)
    return [(name, x) for name, x in calls if x.shape[1] > 1 and x.shape[2] * x.shape[3] > 1]


@pytest.mark.parametrize("channels_last", [True, False])
def test_every_layer_has_the_layout_that_the_spec_asks_for(framework: Framework, channels_last: bool) -> None:
    with framework.solo() as session:
        model, optimizer = session.prepare(Small, recipe(channels_last=channels_last))
        records = layouts(model, {"images": torch.randint(0, 255, (2, 32, 32, 3), dtype=torch.uint8)})
        assert len(records) == 3
        assert [name for name, x in records if not x.is_contiguous(memory_format=LAYOUTS[channels_last])] == []
        with optimizer.micro_batch(last=True):
            optimizer.backward(model({"images": torch.ones(2, 32, 32, 3)})["total"])
        grads = [p.grad for p in model.parameters() if p.dim() == 4 and p.grad is not None and p.shape[2] > 1]
        assert all(grad.is_contiguous(memory_format=LAYOUTS[channels_last]) for grad in grads)


@pytest.mark.parametrize("channels_last", [True, False])
def test_every_layer_of_yolov5_has_the_layout_that_the_spec_asks_for(framework: Framework, channels_last: bool) -> None:
    with framework.solo() as session:
        model, _ = session.prepare(lambda: yolov5_small.ready_network(framework), recipe(channels_last=channels_last))
        records = layouts(model, yolov5_small.batch_of(framework))
        assert len(records) > 100
        assert [name for name, x in records if not x.is_contiguous(memory_format=LAYOUTS[channels_last])] == []


@pytest.mark.parametrize("channels_last", [True, False])
def test_1x1_convolutions_of_few_images_use_the_faster_kernel_with_one_thread(
    framework: Framework, channels_last: bool
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with framework.solo() as session:
            model, optimizer = session.prepare(Small, recipe(channels_last=channels_last))
            with torch.profiler.profile() as profile, optimizer.micro_batch(last=True):
                optimizer.backward(model({"images": torch.ones(2, 32, 32, 3)})["total"])
    finally:
        torch.set_num_threads(threads)
    kernels = {event.key: event.count for event in profile.key_averages() if "conv" in event.key}
    assert kernels["aten::mkldnn_convolution"] == (2 if channels_last else 1)
    assert ("aten::_slow_conv2d_backward" in kernels) is not channels_last


@pytest.mark.parametrize("layout", LAYOUTS.values())
def test_1x1_convolutions_by_onednn_are_as_exact_as_those_of_torch(framework: Framework, layout: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn((4, 32, 20, 20), generator=generator).contiguous(memory_format=layout) for _ in range(2))
    own, onednn = (nn.Sequential(nn.Conv2d(32, 32, 1, bias=False)) for _ in range(2))
    onednn.load_state_dict(own.state_dict())
    avoid_slow_kernels(onednn)
    exact = _learnt(copy.deepcopy(own).double(), x.double(), dy.double())
    for name, value in _learnt(onednn, x, dy).items():
        error = [
            float((each.double() - exact[name]).norm() / exact[name].norm())
            for each in (value, _learnt(own, x, dy)[name])
        ]
        assert error[0] <= max(2 * error[1], 5e-7), (name, error)


def _learnt(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    dx, dw = torch.autograd.grad(y, [x, *module.parameters()], dy)
    return {"output": y.detach(), "input": dx, "weight": dw}
