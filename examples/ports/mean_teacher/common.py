"""Network and data of the mean teacher; shared by its scripts.

Data: the handwritten digits of scikit-learn (8 x 8 pixels), a part of them without their classes. Each sample is read twice, with noise
that depends on the epoch and the number of the sample alone. With `--fp64`, all scripts but port.py compute in float64; for port.py,
`-o train.precision=fp64` does.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

LABELLED_BATCH, UNLABELLED_BATCH, EPOCHS, SEED = 12, 36, 4, 11
BATCHES = 10
"""Batches of an epoch."""
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Two noisy copies of an image (64,), and its class or -1."""

    def __init__(self, *, labelled: bool) -> None:
        digits = load_digits()
        part = slice(BATCHES * LABELLED_BATCH) if labelled else slice(600, 600 + BATCHES * UNLABELLED_BATCH)
        self.images = torch.tensor(digits.data[part] / 16, dtype=torch.float32)
        self.classes = torch.tensor(digits.target[part])
        self.labelled = labelled
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw other noise in each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.Generator().manual_seed(self.epoch * len(self) + index)
        noise = 0.2 * torch.randn(2, 64, generator=seed)
        first, second = (self.images[index] + noise).to(DTYPE)
        return first, second, self.classes[index] if self.labelled else torch.tensor(-1)


def network() -> nn.Module:
    """Build the classifier."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(DTYPE)


def disagreement(one: Tensor, other: Tensor) -> Tensor:
    """Return how far two classifiers' answers are apart."""
    return functional.mse_loss(one.softmax(1), other.softmax(1))
