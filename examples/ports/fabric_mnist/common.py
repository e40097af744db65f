"""Model and data of the Fabric example, and the order of its samples; shared by plain.py, peer.py and port.py.

Data: the handwritten digits of scikit-learn (8 x 8 pixels) in place of MNIST, each pixel repeated so that images are
16 x 16. Global batch: 96 samples, in place of 64 on each rank, so that it divides among 1, 2 and 3 ranks. Dropout is 0:
its random numbers depend on the number of ranks. With `--fp64`, plain.py and peer.py compute in float64; for port.py,
`-o train.precision=fp64` does.
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

GLOBAL_BATCH, EPOCHS, SEED = 96, 3, 1
TRAINING_SAMPLES = 1440
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Images (1, 16, 16) and their classes."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        part = slice(0, TRAINING_SAMPLES) if train else slice(TRAINING_SAMPLES, None)
        images = (digits.images[part, None] / 16).astype(np.float32).repeat(2, axis=2).repeat(2, axis=3)
        self.images = torch.from_numpy(images).to(DTYPE)
        self.classes = torch.from_numpy(digits.target[part])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout = nn.Dropout(0.0)
        self.fc1 = nn.Linear(64 * 36, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the classes' probabilities."""
        x = functional.relu(self.conv1(x))
        x = functional.relu(self.conv2(x))
        x = self.dropout(functional.max_pool2d(x, 2))
        x = self.dropout(functional.relu(self.fc1(torch.flatten(x, 1))))
        return functional.log_softmax(self.fc2(x), dim=1)


def network() -> nn.Module:
    """Build the model."""
    return Net().to(DTYPE)


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of samples whose largest output is that of their class."""
    return float((predictions.argmax(1) == targets).mean())


def loader_order(epoch: int) -> range:
    """Return the order of an epoch, which is the data set's own: the original does not shuffle.

    Fabric gives rank r every size-th sample from r on, so update k of all ranks takes the samples [96 k, 96 (k + 1))
    for every number of ranks.
    """
    return range(TRAINING_SAMPLES)


ORDER = None if "--own-order" in sys.argv else loader_order
"""None, mtrain's own order, with `--own-order`."""
