"""A training script by Muon: an embedding and a head that AdamW trains, hidden matrices, biases and norms."""

import sys

import numpy as np
import torch
from torch import nn

import mtrain


class Texts:
    """Tokens and the class of their sum."""

    def __init__(self) -> None:
        self.tokens = np.random.default_rng(3).integers(0, 11, size=(48, 6))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.tokens[index], int(self.tokens[index].sum() % 3)


class Net(nn.Module):
    """A small network on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 12, bias=False), nn.Tanh()
        )
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(tokens).mean(1)))


def main() -> None:
    with mtrain.session() as session:
        rule = mtrain.Muon(learning_rate=0.02)
        model, optimizer = session.prepare(Net, optimizer=rule, clip_norm=1.0, precision="fp64", seed=1)
        for tokens, classes in session.batches(Texts(), global_batch=12, updates=50):
            optimizer.update(nn.functional.cross_entropy(model(tokens), classes))


if __name__ == "__main__":
    sys.exit(main())
