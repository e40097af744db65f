"""The number of kernels of a step does not depend on the number of weights, and cuDNN's search ends where shapes change."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mtrain.backends._torch.batches import search_while_few
from mtrain.backends._torch.engine import of_one_rank
from mtrain.core.interfaces import Rates
from tests.backends.recipes import recipe

NO_KERNELS = {
    "detach",
    "alias",
    "view",
    "empty_like",
    "empty",
    "_to_copy",
    "as_strided",
    "unbind",
    "lift_fresh",
    "split",
}


class Kernels(TorchDispatchMode):
    """Counts what is computed; views and allocations left out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_KERNELS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class Deep(nn.Module):
    """Layers with BatchNorm, which has buffers that are averaged."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(layers)))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the mean square as the loss."""
        return {"total": self.layers(batch["x"]).square().mean()}


def kernels(layers: int, *, rule: str, late: bool) -> Counter[str]:
    """Kernels of the third step."""
    session = of_one_rank(torch.device("cpu"))
    session.late_figures = late
    chosen = recipe(rule, precision="fp32", clip_norm=0.1, ema_decay=0.9, own_model=True)
    model, optimizer = session.prepare(lambda: Deep(layers), chosen)
    rates = Rates(learning_rates=(0.1, 0.1))
    for _ in range(3):
        with optimizer.micro_batch(last=True):
            optimizer.backward(model({"x": torch.randn(8, 4)})["total"])
        with Kernels() as counted:
            optimizer.step_later(rates, [0.0], []) if late else optimizer.step(rates)
    return counted.calls


@pytest.mark.parametrize("rule", ["sgd", "adamw", "lion", "rmsprop", "lamb"])
@pytest.mark.parametrize("late", [False, True])
def test_clipping_rules_and_average_take_as_many_kernels_for_many_weights_as_for_few(rule: str, late: bool) -> None:
    few, many = kernels(3, rule=rule, late=late), kernels(30, rule=rule, late=late)
    assert many == few
    assert sum(many.values()) <= (40 if rule in ("sgd", "adamw") else 80), many


def test_the_search_for_algorithms_ends_where_shapes_keep_changing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    def batches(*sides: int) -> list[dict[str, Any]]:
        return [{"images": np.zeros((2, side, side, 3)), "targets": np.zeros((side, 6))} for side in sides]

    list(search_while_few(batches(*[32, 64] * 10)))
    assert torch.backends.cudnn.benchmark
    list(search_while_few(batches(*range(32, 320, 32))))
    assert not torch.backends.cudnn.benchmark
