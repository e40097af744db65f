"""The number of kernels of a step does not depend on the number of weights."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mtrain.backends._paddle import nn, paddle
from mtrain.backends._paddle.engine import of_one_rank
from mtrain.backends._paddle.paddle2_compatibility import NEEDED
from mtrain.core.interfaces import Rates
from tests.backends.recipes import recipe

LAUNCH = " kernel launch"
NO_KERNELS = {"reshape", "empty", "empty_like"}
"""Views and allocations, which compute nothing."""


class Deep(paddle.nn.Layer):
    """Layers with BatchNorm, which has buffers that are averaged."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        pairs = [paddle.nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(layers)]
        self.layers = paddle.nn.Sequential(*pairs)

    def forward(self, batch: dict[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
        """Return the mean square as the loss."""
        return {"total": self.layers(batch["x"]).square().mean()}


def kernels(layers: int, folder: Path, *, rule: str, late: bool) -> Counter[str]:
    """Kernels of the third step."""
    session = of_one_rank("cpu")
    session.late_figures = late
    chosen = recipe(rule, precision="fp32", clip_norm=0.1, ema_decay=0.9, own_model=True)
    model, optimizer = session.prepare(lambda: Deep(layers), chosen)
    rates = Rates(learning_rates=(0.1, 0.1))
    target = folder / f"{layers}.json"
    for number in range(3):
        with optimizer.micro_batch(last=True):
            optimizer.backward(model({"x": paddle.randn((8, 4, 2, 2))})["total"])
        profiler = paddle.profiler.Profiler(
            targets=[paddle.profiler.ProfilerTarget.CPU],
            on_trace_ready=lambda finished: finished.export(str(target), "json"),
        )
        if number == 2:
            profiler.start()
        optimizer.step_later(rates, [0.0], []) if late else optimizer.step(rates)
    profiler.stop()
    names = [str(event.get("name", "")).partition("[")[0] for event in json.loads(target.read_text())["traceEvents"]]
    calls = Counter(name.removesuffix(LAUNCH) for name in names if name.endswith(LAUNCH))
    return Counter({name: count for name, count in calls.items() if name not in NO_KERNELS})


@pytest.mark.skipif(NEEDED, reason="Paddle 2.6 names its kernels otherwise")
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("late", [False, True])
def test_clipping_rules_and_average_take_as_many_kernels_for_many_weights_as_for_few(
    tmp_path: Path, rule: str, late: bool
) -> None:
    few, many = (kernels(layers, tmp_path, rule=rule, late=late) for layers in (3, 30))
    assert few["concat"] >= 1, "nothing was counted"
    assert many == few
    assert sum(many.values()) <= 100, many
