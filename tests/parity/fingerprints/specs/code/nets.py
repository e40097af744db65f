"""A module and data of a user: plain torch and numpy, without mtrain."""

import numpy as np
from torch import Tensor, nn


class Rows:
    """Rows whose class is the sign of their sum; a training row gets new noise each time it is read."""

    def __init__(self, split: str = "train", train: int = 40) -> None:
        generator = np.random.default_rng(0 if split == "train" else 1)
        self.rows = generator.standard_normal((train if split == "train" else 8, 8)).astype(np.float32)
        self.noise = 0.1 if split == "train" else 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        noise = np.random.standard_normal(8).astype(np.float32) * np.float32(self.noise)
        return self.rows[index] + noise, int(self.rows[index].sum() > 0)


class Net(nn.Module):
    """Two layers with BatchNorm and dropout between them; its output is the loss of a batch."""

    def __init__(self, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2)
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)
