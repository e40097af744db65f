"""Every network that can be pruned: the smaller one computes what the masked one does, in float64, on both frameworks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Array, Model, Recipe, State, Task
from mtrain.core.network import pruned
from mtrain.spec import plugins
from mtrain.spec.registry import Registry
from mtrain_deploy.pruning.network import LEAST, Prunable, mask, shrink
from mtrain_deploy.pruning.scores import scores_of
from mtrain_deploy.pruning.tracing import trace
from tests.framework import Framework

CASES: Mapping[str, tuple[str, int, Mapping[str, Any], float]] = {
    "yolov5n": ("yolov5n", 64, {}, 0.4),
    "ppyoloe_s": ("ppyoloe_s", 64, {}, 0.4),
    "resnet18": ("resnet18", 32, {}, 0.4),
    "resnet50": ("resnet50", 32, {}, 0.4),
    "vit": ("vit", 32, {}, 0.7),
    "unet": ("unet", 32, {}, 0.4),
    "liteseg": ("liteseg", 64, {}, 0.4),
}
"""Name of a case -> model, side of the images, options, share of the FLOPs that is left."""
MARKS = {
    **dict.fromkeys(("resnet50", "liteseg", "unet"), pytest.mark.slow),
    **dict.fromkeys(("ppyoloe_s", "resnet18"), pytest.mark.under_torch),
}
"""Float64 on the CPU takes Paddle ten times as long."""


def recipe(precision: Any = "fp64") -> Recipe:
    return Recipe(rule="sgd", groups=(("", {}),), micro_batch=2, precision=precision)


def batch_of(kind: str, side: int) -> dict[str, Array]:
    """A micro batch of two images with noise."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (2, side, side, 3), dtype=np.uint8)
    batch = {"index": np.arange(2), "images": images, "epoch": np.array([0])}
    if kind == "detection":
        rows = [[i, i, 0.5, 0.4, 0.3, 0.4] for i in range(2)]
        return {**batch, "targets": np.array(rows, np.float32)}
    if kind == "segmentation":
        masks = rng.integers(0, 3, (2, side, side, 1), dtype=np.uint8)
        return {**batch, "pixels": np.concatenate([images, masks], axis=3)}
    return {**batch, "labels": np.array([0, 2])}


def drawn(shapes: Mapping[str, tuple[int, ...]], start: Mapping[str, Array]) -> dict[str, Array]:
    """Start values as after training: no scale of a BatchNorm is 1, and no array is 0."""
    rng = np.random.default_rng(1)
    values = {
        name: rng.normal(0, 0.1, array.shape).astype(array.dtype)
        if array.dtype.kind == "f" and not array.any()
        else array
        for name, array in start.items()
    }
    for name, shape in shapes.items():
        if f"{name.rpartition('.')[0]}.running_var" in shapes and not name.endswith("num_batches_tracked"):
            values[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return values


class Case:
    """A model with weights, traced."""

    def __init__(self, plugin: Model, side: int, session: Any) -> None:
        names = ("a", "b", "c")
        task = Task(kind=plugin.kind, class_names=names, image_size=side, global_batch=2)
        self.plugin, self.task, self.session = plugin, plugin.prepare_task(task, {}), session
        self.batch = batch_of(plugin.kind, side)
        network, optimizer = self.prepared(None)
        state = session.state(network, optimizer).weights
        shapes = {name: array.shape for name, array in state.items()}
        self.weights = drawn(shapes, plugin.initial(shapes, self.task, seed=0))
        self.network = Prunable(
            trace(plugin, self.task, OneRank(), evaluation=self.batch, training=self.batch, sizes=None)
        )

    def prepared(self, sizes: Any) -> tuple[Any, Any]:
        return self.session.prepare(lambda: pruned.build(self.plugin, self.task, OneRank(), sizes), recipe())

    def outputs(self, weights: Mapping[str, Array], sizes: Any) -> dict[str, Array]:
        network, optimizer = self.prepared(sizes)
        self.session.restore(network, optimizer, State(weights=dict(weights)))
        network.eval()
        (batch,) = self.session.batches([self.batch])
        return self.session.infer(network, batch)

    def losses(self, sizes: Any, weights: Mapping[str, Array]) -> float:
        network, optimizer = self.prepared(sizes)
        self.session.restore(network, optimizer, State(weights=dict(weights)))
        network.train()
        (batch,) = self.session.batches([self.batch])
        with optimizer.micro_batch(last=True):
            loss = network(batch)["total"]
            optimizer.backward(loss)
        return float(loss.detach())


def plugin_of(model: str, options: Mapping[str, Any]) -> Model:
    return plugins.load("models", model)(Registry.read().options("models", model, dict(options), path=""))


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) if name in MARKS else name for name in CASES])
def test_the_smaller_network_computes_what_the_masked_one_does(framework: Framework, name: str) -> None:
    framework.one_thread()
    model, side, options, target = CASES[name]
    with framework.solo() as session:
        case = Case(plugin_of(model, options), side, session)
        network, weights = case.network, case.weights
        scores = scores_of(network, weights, "l1", lambda: iter(()))
        removed = network.select(scores, target)
        sizes, small = network.sizes(removed), shrink(network, weights, removed)
        masked = case.outputs(mask(network, weights, removed), None)
        less = case.outputs(small, sizes)
        whole = case.outputs(weights, None)
        difference = max(np.abs(masked[key] - less[key]).max() for key in masked)
        largest = max(np.abs(array).max() for array in masked.values())
        print(f"{framework.name}, {name}: {difference:.1e} of {largest:.3g}, {len(network.groups)} groups")
        assert difference <= 1e-10 * max(largest, 1)
        assert max(np.abs(whole[key] - less[key]).max() for key in whole) > 1e-4 * largest  # something was removed
        assert network.flops(removed) <= target * network.flops()
        assert np.isfinite(case.losses(sizes, small))
        for group in network.groups:
            assert sum(number not in removed for number in group.sets) >= max(1, round(LEAST * len(group.sets)))
