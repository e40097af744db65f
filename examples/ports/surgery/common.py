"""Network and data of the gradient surgery; shared by its scripts.

Data: the handwritten digits of scikit-learn (8 x 8 pixels), of which two things are learned: the class, and how much ink there is. A
few inks are wrong, and the gradient of their batch is too large to be used. With `--fp64`, all scripts but port.py compute in float64;
for port.py, `-o train.precision=fp64` does.
"""

import sys
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

GLOBAL_BATCH, EPOCHS, SEED = 24, 6, 13
TRAINING_SAMPLES = 240
LARGEST_NORM = 8.0
"""Updates whose gradient is larger are left out."""
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Images (64,), their classes, and their ink."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        part = slice(TRAINING_SAMPLES) if train else slice(TRAINING_SAMPLES, TRAINING_SAMPLES + 120)
        images = torch.tensor(digits.data[part] / 16, dtype=torch.float32)
        self.classes = torch.tensor(digits.target[part])
        self.images, self.ink = images.to(DTYPE), (images.sum(1) / 20).to(DTYPE)
        if train:
            self.ink[100:103] *= 40

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.images[index], self.classes[index], self.ink[index]


class TwoTasks(nn.Module):
    """A classifier and a regression on the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(64, 24), nn.Tanh())
        self.classes, self.ink = nn.Linear(24, 10), nn.Linear(24, 1)
        self.to(DTYPE)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and ink."""
        shared = self.shared(images)
        return self.classes(shared), self.ink(shared).squeeze(1)


def losses(outputs: tuple[Tensor, Tensor], classes: Tensor, ink: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of both tasks."""
    return functional.cross_entropy(outputs[0], classes), functional.mse_loss(outputs[1], ink)


def surgery(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of two gradients, each without the part that goes against the other one (Yu et al. 2020)."""
    dot = sum((a * b).sum() for a, b in zip(one, other, strict=True))
    if dot >= 0:
        return [a + b for a, b in zip(one, other, strict=True)]
    squares = [sum(a.square().sum() for a in gradients) for gradients in (one, other)]
    return [a - dot / squares[1] * b + b - dot / squares[0] * a for a, b in zip(one, other, strict=True)]


def norm(gradients: Sequence[Tensor]) -> float:
    """Return the norm of a gradient."""
    return float(sum(gradient.square().sum() for gradient in gradients).sqrt())


def error_of(model: nn.Module, loader: DataLoader) -> float:
    """Return the sum of both losses on a test set of one batch."""
    weight = next(model.parameters())
    images, classes, ink = next(iter(loader))
    with torch.no_grad():
        return float(sum(losses(model(images.to(weight)), classes, ink.to(weight))))
