"""A network with every kind of layer that pruning follows: the smaller one computes what the masked one does."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtrain.core import nn, ops
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Array
from mtrain.core.network import pruned
from mtrain_deploy.pruning.network import Prunable, mask, shrink
from mtrain_deploy.pruning.tracing import trace
from tests.framework import Framework

SIDE = 6
BATCH = {"x": np.random.default_rng(0).normal(size=(2, 3, SIDE, SIDE)).astype(np.float32)}


def plugin(framework: Framework) -> Any:
    """A model whose layers are grouped, depthwise, transposed, joined, added, split and scaled by their means."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, 1, 1)
            self.stem_bn = nn.BatchNorm2d(8)
            self.deep = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
            self.grouped = nn.Conv2d(8, 12, 3, 1, 1, groups=2)
            self.up = nn.ConvTranspose2d(12, 6, 2, 2)
            self.side = nn.Conv2d(3, 6, 1)
            self.gate = nn.Conv2d(6, 6, 1)
            self.joined = nn.Conv2d(14, 8, 1)
            self.twice = nn.Conv2d(4, 6, 1)
            self.hidden = nn.Linear(6, 10)
            self.head = nn.Linear(10, 2)

        def forward(self, batch: Any) -> dict[str, Any]:
            x = batch["x"]
            stem = ops.relu(self.stem_bn(self.stem(x)))
            y = self.grouped(self.deep(stem))
            y = self.up(y)[:, :, ::2, ::2] + self.side(x)
            y = y * ops.sigmoid(self.gate(ops.mean(y, axis=(2, 3), keepdims=True)))
            y = self.joined(ops.concat((y, stem), axis=1))
            one, other = ops.split(y, (ops.shape(y)[1] // 2, ops.shape(y)[1] // 2), axis=1)
            y = self.twice(one * other)
            rows = ops.permute_dims(ops.reshape(y, (2, ops.shape(y)[1], -1)), (0, 2, 1))
            return {"out": self.head(ops.relu(self.hidden(rows)))}

    return SimpleNamespace(build=lambda task, collective: framework.to(Net(), "float32"), fused=lambda weights: None)


def outputs(framework: Framework, model: Any, weights: Mapping[str, Array], sizes: Any) -> Array:
    network = pruned.build(model, None, OneRank(), sizes)  # type: ignore[arg-type]
    framework.load(network, weights)
    network.eval()
    with nn.no_grad():
        return ops.to_numpy(network({"x": framework.tensor(BATCH["x"])})["out"])


def traced(model: Any) -> Prunable:
    return Prunable(trace(model, None, OneRank(), evaluation=BATCH, training=None))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_the_smaller_network_computes_what_the_masked_one_does(framework: Framework, seed: int) -> None:
    framework.one_thread()
    model = plugin(framework)
    network, rng = traced(model), np.random.default_rng(seed)
    state = {name: ops.to_numpy(x) for name, x in framework.state(model.build(None, OneRank())).items()}
    floats = {name: x for name, x in state.items() if x.dtype.kind == "f"}
    weights = {name: np.asarray(rng.normal(0.0, 0.5, x.shape), x.dtype) for name, x in floats.items()}
    weights["stem_bn.running_var"] = np.abs(weights["stem_bn.running_var"]) + np.float32(0.5)
    removed = [
        number for group in network.groups for number in rng.permutation(group.sets)[: len(group.sets) // 2].tolist()
    ]
    whole = outputs(framework, model, weights, None)
    masked = outputs(framework, model, mask(network, weights, removed), None)
    less = outputs(framework, model, shrink(network, weights, removed), network.sizes(removed))
    np.testing.assert_allclose(less, masked, rtol=1e-4, atol=1e-5 * np.abs(masked).max())
    assert np.abs(whole - less).max() > 1e-2 * np.abs(whole).max(), "something was removed"


def test_channels_go_together_where_the_layers_need_it(framework: Framework) -> None:
    """By layer, the number of channels that can be chosen apart from each other."""
    network = traced(plugin(framework))
    assert {group.layers: len(group.sets) for group in network.groups} == {
        # A group of ``grouped`` reads half of them, and both halves lose the same places.
        ("stem", "deep"): 4,
        ("up", "side", "gate"): 6,
        # The two halves of ``joined`` are multiplied.
        ("joined",): 4,
        ("twice",): 6,
        ("hidden",): 10,
    } | {("grouped",): 6}
