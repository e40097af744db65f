"""Networks and data of the WGAN-GP; shared by its scripts.

Data: eight clusters of points on a circle, each point with the noise and the place of the penalty of its sample, which depend on the
epoch and the number of the sample alone. With `--fp64`, plain.py computes in float64; for port.py, `-o train.precision=fp64` does.
"""

import math
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

GLOBAL_BATCH, EPOCHS, SEED = 24, 3, 7
CRITIC_UPDATES = 3
"""Updates of the critic for each one of the generator."""
NOISE = 4
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Points(Dataset):
    """Points (2,), noise (4,) and places of the penalty between 0 and 1."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw other numbers in each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return 288

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.Generator().manual_seed(self.epoch * len(self) + index)
        angle = torch.tensor(index % 8 * math.pi / 4)
        point = torch.stack([angle.cos(), angle.sin()]) + 0.05 * torch.randn(2, generator=seed)
        noise, place = torch.randn(NOISE, generator=seed), torch.rand(1, generator=seed)
        return point.to(DTYPE), noise.to(DTYPE), place.to(DTYPE)


class Layers(nn.Module):
    """A perceptron."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)
        )
        self.to(DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.layers(x)


def generator() -> nn.Module:
    """Build the network that makes points."""
    return Layers(NOISE, 2)


def critic() -> nn.Module:
    """Build the network that scores points."""
    return Layers(2, 1)


def penalty(network: nn.Module, points: Tensor, made: Tensor, places: Tensor) -> Tensor:
    """Return by how much the slope of ``network`` between points of the data and made ones differs from 1."""
    between = (places * points + (1 - places) * made).requires_grad_()
    (slope,) = torch.autograd.grad(network(between).sum(), between, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()
