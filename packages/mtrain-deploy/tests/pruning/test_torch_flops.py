"""FLOPs of networks and of their pruned ones, against torch's own counter."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.pruning.test_networks import batch_of
from torch.utils.flop_counter import FlopCounterMode

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Task
from mtrain.core.network import pruned
from mtrain.spec import plugins
from mtrain.spec.registry import Registry
from mtrain_deploy.pruning.network import Prunable
from mtrain_deploy.pruning.tracing import trace
from tests.framework import Framework

SIDE = 32
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "unet": ("aten.convolution",),
    "liteseg": ("aten.convolution",),
    "vit": ("aten.convolution", "aten.addmm", "aten.mm"),
}
"""Model with transposed convolutions, depthwise ones, linear layers -> what these layers call. Products of other operations
(attention, resizing) are none of a layer."""


def counted(network: Any, batch: Mapping[str, Any], products: tuple[str, ...]) -> int:
    """Return torch's count for one of the two images."""
    network.eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        network({name: torch.from_numpy(array) for name, array in batch.items()})
    kinds = counter.get_flop_counts()["Global"]
    return sum(count for kind, count in kinds.items() if str(kind) in products) // 2


@pytest.mark.parametrize("model", PRODUCTS)
def test_flops_are_those_that_torch_counts_before_and_after_pruning(framework: Framework, model: str) -> None:
    framework.one_thread()
    plugin = plugins.load("models", model)(Registry.read().options("models", model, {}, path=""))
    task = Task(kind=plugin.kind, class_names=("a", "b", "c"), image_size=SIDE, global_batch=2)
    task, batch = plugin.prepare_task(task, {}), batch_of(plugin.kind, SIDE)
    network = Prunable(trace(plugin, task, OneRank(), evaluation=batch, training=batch, sizes=None))
    whole = counted(plugin.build(task, OneRank()), batch, PRODUCTS[model])
    assert network.flops() == whole
    chosen = np.random.default_rng(0).permutation([number for group in network.groups for number in group.sets[1:]])
    removed = [int(number) for number in chosen[: len(chosen) // 2]]
    less = counted(pruned.build(plugin, task, OneRank(), network.sizes(removed)), batch, PRODUCTS[model])
    assert less < whole
    assert network.flops(removed) == less
