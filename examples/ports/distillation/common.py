"""Student, teacher and data of the distillation; shared by its scripts.

Data: the handwritten digits of scikit-learn (8 x 8 pixels). The teacher knows the mean image of each class. With `--fp64`, plain.py
computes in float64; for port.py, `-o train.precision=fp64` does.
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

GLOBAL_BATCH, EPOCHS, SEED = 36, 2, 5
TRAINING_SAMPLES = 1440
TEMPERATURE = 4.0
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Images (64,) from 0 to 1, and their classes."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        part = slice(TRAINING_SAMPLES) if train else slice(TRAINING_SAMPLES, None)
        self.images = torch.tensor(digits.data[part] / 16, dtype=DTYPE)
        self.classes = torch.tensor(digits.target[part])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]


def teacher() -> nn.Module:
    """Build a trained classifier: the class whose mean image is the nearest."""
    digits = load_digits()
    images, classes = digits.data[:TRAINING_SAMPLES] / 16, digits.target[:TRAINING_SAMPLES]
    means = torch.tensor(np.stack([images[classes == number].mean(axis=0) for number in range(10)]))
    layer = nn.Linear(64, 10)
    with torch.no_grad():
        layer.weight.copy_(means)
        layer.bias.copy_(-means.square().sum(1) / 2)
    return layer.to(DTYPE)


def student() -> nn.Module:
    """Build the network that learns from the teacher."""
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).to(DTYPE)


def distance(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the distance of a student's softened answers from those of its teacher."""
    own = functional.log_softmax(logits / TEMPERATURE, dim=1)
    return TEMPERATURE**2 * functional.kl_div(
        own, functional.softmax(taught / TEMPERATURE, dim=1), reduction="batchmean"
    )


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of samples whose largest output is that of their class."""
    return float((predictions.argmax(1) == targets).mean())
