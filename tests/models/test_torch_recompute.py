"""How many bytes of a model's inner results torch keeps for the backward pass, with ``train.recompute`` and without.

Under Paddle its hooks do not show the inputs that its own function holds; docs/memory.md has the resident memory of both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.core.interfaces import Rates
from mtrain_kit import training
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
                total = model(next(session.batches([plugin.arranged(batch(0))])))["total"]
                held = sum(kept.values())
                optimizer.backward(total)
            del total
            sizes.append(held - (0 if patterns else min(parameters, held)))
    print(f"{name}: {sizes[1]} of {sizes[0]} bytes, {sizes[1] / sizes[0]:.2f}")
    assert sizes[1] < share * sizes[0]


class Own(torch.nn.Module):
    """A user's module: torch's dropout, and a buffer that each forward pass changes and computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), Spinning(), torch.nn.Tanh())
        self.head = torch.nn.Linear(6, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"total": self.head(self.inner(batch["x"])).square().mean()}


class Spinning(torch.nn.Module):
    """Multiplies by a factor that grows in each pass in training, as vectors of a spectral norm turn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.factor.mul_(1.25)
        return x * self.factor.clone()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_module_of_a_user_learns_the_same_bits(framework: Framework, precision: str) -> None:
    states = []
    with framework.solo() as session:
        for patterns in ((), ("^inner$",)):
            torch.manual_seed(3)
            chosen = recipe(recompute=patterns, own_model=True, precision=precision)
            model, optimizer = session.prepare(Own, chosen)
            for number in range(3):
                images = np.random.default_rng(number).normal(size=(4, 6)).astype(np.float32)
                with optimizer.micro_batch(last=True):
                    optimizer.backward(model(next(session.batches([{"x": images}])))["total"])
                optimizer.step(Rates(learning_rates=(0.05,)))
            states.append(training.flat(session.state(model, optimizer)))
    assert training.differing_names(*states) == []
    assert float(states[0]["weights/inner.2.factor"][0]) == pytest.approx(1.25**3)
