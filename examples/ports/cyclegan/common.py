"""Networks and data of the CycleGAN; shared by its scripts.

Data: the handwritten digits of scikit-learn (8 x 8 pixels) as they are, and other ones turned by 90 degrees. With `--fp64`, plain.py
computes in float64; for port.py, `-o train.precision=fp64` does.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

GLOBAL_BATCH, EPOCHS, SEED = 12, 2, 3
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Images (1, 8, 8) from -1 to 1."""

    def __init__(self, *, turned: bool) -> None:
        part = slice(180, 360) if turned else slice(180)
        images = torch.tensor(load_digits().images[part, None] / 8 - 1, dtype=DTYPE)
        self.images = images.rot90(1, (2, 3)) if turned else images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


class Generator(nn.Module):
    """Makes an image of one kind of an image of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1, bias=False),
            nn.InstanceNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3, padding=1, bias=False),
            nn.InstanceNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 1, 3, padding=1),
            nn.Tanh(),
        )
        self.to(DTYPE)

    def forward(self, images: Tensor) -> Tensor:
        """Return images."""
        return self.layers(images)


class Discriminator(nn.Module):
    """Tells images of the data from those of a generator, patch by patch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 12, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(12, 1, 3, padding=1))
        self.to(DTYPE)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores."""
        return self.layers(images)


def says(scores: Tensor, value: float) -> Tensor:
    """Return the least-squares loss of a discriminator that should say ``value``."""
    return functional.mse_loss(scores, torch.full_like(scores, value))
