"""Model and data of Horovod's example, and the order of its samples; shared by plain.py, peer.py and port.py.

Data: the handwritten digits of scikit-learn (8 x 8 pixels) in place of MNIST, each pixel repeated so that images are
24 x 24. Global batch: 96 samples, in place of 64 on each rank, so that it divides among 1, 2 and 3 ranks. Dropout is 0:
its random numbers depend on the number of ranks. With `--fp64`, plain.py and peer.py compute in float64; for port.py,
`-o train.precision=fp64` does.
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, DistributedSampler

GLOBAL_BATCH, EPOCHS, SEED = 96, 10, 42
TRAINING_SAMPLES = 1440
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Images (1, 24, 24) and their classes."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        part = slice(0, TRAINING_SAMPLES) if train else slice(TRAINING_SAMPLES, None)
        images = (digits.images[part, None] / 16).astype(np.float32).repeat(3, axis=2).repeat(3, axis=3)
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
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop = nn.Dropout(0.0)
        self.fc1 = nn.Linear(180, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the classes' probabilities."""
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.drop(self.conv2(x)), 2))
        x = functional.relu(self.fc1(x.flatten(1)))
        return functional.log_softmax(self.fc2(self.drop(x)), dim=1)


def network() -> nn.Module:
    """Build the model."""
    return Net().to(DTYPE)


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of samples whose largest output is that of their class."""
    return float((predictions.argmax(1) == targets).mean())


def sampler_order(epoch: int) -> list[int]:
    """Return the order of an epoch by `DistributedSampler`, over all ranks together.

    The sampler gives rank r every size-th sample from r on, so update k of all ranks takes the samples
    [96 k, 96 (k + 1)) of this order for every number of ranks.
    """
    sampler = DistributedSampler(range(TRAINING_SAMPLES), num_replicas=1, rank=0)
    sampler.set_epoch(epoch)
    return list(sampler)


ORDER = None if "--own-order" in sys.argv else sampler_order
"""None, mtrain's own order, with `--own-order`."""
