"""Model and data of Accelerate's vision example, and the order of its samples; shared by plain.py, peer.py and port.py.

Data: the handwritten digits of scikit-learn (8 x 8 pixels) in place of the Oxford-IIIT pets, so without random crops.
Model: a small residual network from scratch in place of a pretrained ResNet-50d, so without a frozen part; it has
GroupNorm, because BatchNorm's statistics are those of a rank's share and so depend on the number of ranks. Global
batch: 96 samples in place of 64 on each rank. With `--fp64`, plain.py and peer.py compute in float64; for port.py,
`-o train.precision=fp64` does.
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

GLOBAL_BATCH, EPOCHS, SEED, LR = 96, 2, 42, 3e-2
MEAN, STD = 0.3, 0.38
"""Mean and standard deviation of the pixels."""
TRAINING_SAMPLES = 1440
UPDATES_PER_EPOCH = TRAINING_SAMPLES // GLOBAL_BATCH
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Images (1, 8, 8) and their classes, as dicts."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        part = slice(0, TRAINING_SAMPLES) if train else slice(TRAINING_SAMPLES, None)
        self.images = torch.from_numpy((digits.images[part, None] / 16).astype(np.float32)).to(DTYPE)
        self.classes = torch.from_numpy(digits.target[part])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.classes[index]}


class Block(nn.Module):
    """A residual block (He et al. 2015) with GroupNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations, (batch, channels, height, width) as ``x``."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(inner)))


def network() -> nn.Module:
    """Build the model."""
    stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(stem, Block(16), nn.MaxPool2d(2), Block(16), head).to(DTYPE)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Make the original's optimizer."""
    return torch.optim.Adam(model.parameters(), lr=LR / 25)


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of samples whose prediction is their class."""
    return float((predictions == targets).mean())


def shuffled(data: Dataset) -> DataLoader:
    """Return a loader that shuffles with a generator of its own, seeded by SEED."""
    generator = torch.Generator().manual_seed(SEED)
    return DataLoader(data, shuffle=True, batch_size=GLOBAL_BATCH, generator=generator)


def loader_order(epoch: int) -> list[int]:
    """Return the order in which ``shuffled`` reads the samples in an epoch; Accelerate divides the same batches."""
    loader = shuffled(range(TRAINING_SAMPLES))
    for _ in range(epoch):
        list(loader)
    return [int(index) for batch in loader for index in batch]


ORDER = None if "--own-order" in sys.argv else loader_order
"""None, mtrain's own order, with `--own-order`."""


def one_cycle(update: int) -> float:
    """Return the learning rate of an update by torch's OneCycleLR, as the original makes it."""
    optimizer = torch.optim.SGD([torch.zeros(1)])
    steps = {"epochs": EPOCHS, "steps_per_epoch": UPDATES_PER_EPOCH}
    scheduler = OneCycleLR(optimizer, max_lr=LR, cycle_momentum=False, **steps)
    for _ in range(update):
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()[0]
