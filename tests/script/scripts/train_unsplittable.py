"""Scripts whose model some libraries cannot split: with a parameter without axes, or a list of modules."""

import sys

import torch
from torch import nn

import mtrain


class Scaled(nn.Module):
    """A layer with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.temperature.exp()


def pair() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])


if __name__ == "__main__":
    with mtrain.session() as session:
        session.prepare(Scaled if sys.argv[1] == "scalar" else pair, optimizer=mtrain.AdamW(learning_rate=1e-2))
