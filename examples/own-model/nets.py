"""A classifier for rows of numbers, and its metric: plain torch, without mtrain."""

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class MyNet(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 2))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch, as the mean over its samples."""
        inputs, targets = batch
        return cross_entropy(self.layers(inputs), targets)

    def predict(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of a batch, for the metrics."""
        inputs, targets = batch
        return self.layers(inputs).argmax(1), targets


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of right predictions, from those of the whole split."""
    return float((predictions == targets).mean())
