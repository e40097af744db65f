"""Networks and data of the DCGAN; shared by its scripts.

Data: the handwritten digits of scikit-learn (8 x 8 pixels), each with the noise of its place in the batch. The noise of a sample
depends on the epoch and its number alone, so it is the same on any number of ranks. With `--fp64`, all scripts but port.py
compute in float64; for port.py, `-o train.precision=fp64` does.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

GLOBAL_BATCH, EPOCHS, SEED = 24, 2, 999
NOISE = 16
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Images (1, 8, 8) from -1 to 1, and noise (16, 1, 1)."""

    def __init__(self) -> None:
        self.images = torch.tensor(load_digits().images[:480, None] / 8 - 1, dtype=DTYPE)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw other noise in each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        seed = torch.Generator().manual_seed(self.epoch * len(self) + index)
        return self.images[index], torch.randn(NOISE, 1, 1, generator=seed).to(DTYPE)


def start(module: nn.Module) -> None:
    """Set the start values of a layer as in the paper."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


class Generator(nn.Module):
    """Makes an image of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 32, 4, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.apply(start)
        self.to(DTYPE)

    def forward(self, noise: Tensor) -> Tensor:
        """Return images."""
        return self.layers(noise)


class Discriminator(nn.Module):
    """Tells images of the data from those of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 1, 4, bias=False),
        )
        self.apply(start)
        self.to(DTYPE)

    def forward(self, images: Tensor) -> Tensor:
        """Return a logit for each image."""
        return self.layers(images).flatten()
