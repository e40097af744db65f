"""How many bytes of a model's inner results torch keeps for the backward pass, with ``train.recompute`` and without.

Under Paddle its hooks do not show the inputs that its own function holds; docs/memory.md has the resident memory of both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.framework import Framework
from tests.models.test_recompute import batch, made, recipe


@contextmanager
def counted() -> Iterator[dict[int, int]]:
    """Bytes of each piece of memory that torch keeps for the backward pass, by its address."""
    kept: dict[int, int] = {}

    def pack(x: Any) -> Any:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


@pytest.mark.parametrize(("name", "share"), [("yolov5n", 0.5), ("ppyoloe_s", 0.6), ("vit", 0.5), ("unet", 0.6)])
def test_recomputed_blocks_keep_less(framework: Framework, name: str, share: float) -> None:
    plugin, task = made(name)
    sizes = []
    with framework.solo() as session:
        for patterns in ((), plugin.recomputable):
            model, optimizer = session.prepare(
                lambda: plugin.build(task, session.collective), recipe(recompute=patterns)
            )
            parameters = sum(p.numel() * p.element_size() for p in model.parameters())
            with optimizer.micro_batch(last=True), counted() as kept:
                total = model(next(session.batches([batch(0)])))["total"]
                held = sum(kept.values())
                optimizer.backward(total)
            del total
            sizes.append(held - (0 if patterns else min(parameters, held)))
    print(f"{name}: {sizes[1]} of {sizes[0]} bytes, {sizes[1] / sizes[0]:.2f}")
    assert sizes[1] < share * sizes[0]
