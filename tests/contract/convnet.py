"""A small detector-like network and its data: what the contract tests train."""

import numpy as np
import torch
from torch import nn

from mtrain.backends._torch.nn import BatchNorm2d

SAMPLES, SIDE, CLASSES = 48, 8, 4


def data() -> tuple[np.ndarray, np.ndarray]:
    """48 pictures (float64, N3HW) and their classes; the first ones are loud, so that some updates are clipped."""
    generator = np.random.default_rng(7)
    pictures = generator.normal(size=(SAMPLES, 3, SIDE, SIDE))
    return pictures, generator.integers(0, CLASSES, SAMPLES)


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm, one linear head; returns losses in training and logits in evaluation."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = BatchNorm2d(6, momentum=0.03)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False)
        self.bn2 = BatchNorm2d(8, momentum=0.03)
        self.head = nn.Linear(8, CLASSES)
        self.drop = nn.Dropout(dropout)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = batch["images"].to(self.conv1.weight.dtype)
        x = torch.nn.functional.silu(self.bn1(self.conv1(x)))
        x = torch.nn.functional.silu(self.bn2(self.conv2(x)))
        logits = self.head(self.drop(x.mean((2, 3))))
        if not self.training:
            return {"logits": logits}
        entropy = torch.nn.functional.cross_entropy(logits.to(self.head.weight.dtype), batch["labels"])
        return {"total": 5 * entropy, "entropy": entropy.detach()}
