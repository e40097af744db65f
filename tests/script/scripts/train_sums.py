"""A training script whose losses are sums, or means over tokens of which samples have different numbers, and some none."""

import argparse
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import mtrain

KINDS = ("sum", "tokens", "total")
"""A sum over tokens, a mean over tokens, and the same mean given as a sum and a number."""
LENGTH, BATCH, EPOCHS = 50, 12, 10


class Sentences:
    """Up to five tokens in each sample; the first eleven samples have none, so that a rank or a whole micro batch has none."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(3)
        self.inputs = numbers.normal(size=(LENGTH, 5, 8))
        self.targets = numbers.integers(0, 3, size=(LENGTH, 5))
        counts = np.where(np.arange(LENGTH) < 11, 0, numbers.integers(0, 6, size=LENGTH))
        self.targets[np.arange(5) >= counts[:, None]] = -100

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[index], self.targets[index]


def net() -> nn.Module:
    torch.manual_seed(0)  # several models start alike
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def of_batch(model: nn.Module, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of the tokens, and their number."""
    inputs, targets = batch
    total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets >= 0).sum()


def update(optimizer, kind: str, total: torch.Tensor, count: torch.Tensor, call: str = "update", **words) -> None:
    take = getattr(optimizer, call)
    if kind == "sum":
        take(total, reduction="sum", **words)
    elif kind == "tokens":
        take(total / count, weight=count, **words)  # not a number where there are none
    else:
        take(total, reduction="sum", weight=int(count), **words)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("--accumulate", type=int, default=1)
    flags = parser.parse_args()
    loader = DataLoader(Sentences(), batch_size=BATCH, drop_last=False)
    settings = {"clip_norm": 0.5, "schedule": mtrain.Cosine()}
    shared = {"precision": "fp64", "accumulate": flags.accumulate}
    with mtrain.session() as session:
        kinds = KINDS if flags.kind == "all" else [flags.kind]
        prepared = {}
        for kind in kinds:
            name = {"name": kind} if flags.kind == "all" else {}
            optimizer = mtrain.AdamW(learning_rate=1e-2)
            prepared[kind] = session.prepare(net, optimizer=optimizer, **settings, **shared, **name)
            shared = {}
        for batch in session.batches(loader, epochs=EPOCHS):
            losses = [(kind, optimizer, *of_batch(model, batch)) for kind, (model, optimizer) in prepared.items()]
            for kind, optimizer, total, count in losses:
                update(optimizer, kind, total, count, "backward" if len(kinds) > 1 else "update")
            if len(kinds) > 1:
                for _, optimizer, *_ in losses:
                    optimizer.step()


if __name__ == "__main__":
    sys.exit(main())
