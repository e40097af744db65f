"""What the two scripts of a mixture share: a model with fixed start weights, and data of one batch."""

import torch
from torch import nn


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.sin(torch.arange(parameter.numel(), dtype=torch.float32)).reshape(parameter.shape))
    return model


class Points(torch.utils.data.Dataset):
    """24 points in two classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(24, 8, generator=generator)
        self.targets = (self.inputs.sum(1) > 0).long()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]
