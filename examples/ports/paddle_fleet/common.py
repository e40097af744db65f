"""Model and data of Paddle's fleet example, and the order of its samples; shared by plain.py, peer.py and port.py.

Data: the handwritten digits of scikit-learn (8 x 8 pixels) in place of CIFAR-10, with one channel, and layers that fit.
Global batch: 96 samples, the original's 32 on each of three ranks. With `--fp64`, plain.py and peer.py compute in
float64; for port.py, `-o train.precision=fp64` does.
"""

import sys

import numpy as np
import paddle
from paddle import Tensor
from paddle.io import Dataset, DistributedBatchSampler
from paddle.nn import functional
from sklearn.datasets import load_digits

GLOBAL_BATCH, EPOCHS, SEED, RATE = 96, 10, 42, 0.001
TRAINING_SAMPLES = 1440
DTYPE = "float64" if "--fp64" in sys.argv else "float32"


class Digits(Dataset):
    """Images (1, 8, 8) and their classes."""

    def __init__(self, *, train: bool) -> None:
        super().__init__()
        digits = load_digits()
        part = slice(0, TRAINING_SAMPLES) if train else slice(TRAINING_SAMPLES, None)
        self.images = (digits.images[part, None] / 16).astype(np.float32).astype(DTYPE)
        self.classes = digits.target[part].astype(np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.images[index], self.classes[index]


class MyNet(paddle.nn.Layer):
    """Three convolutions and two linear layers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = paddle.nn.Conv2D(1, 32, kernel_size=(3, 3), padding=1)
        self.conv2 = paddle.nn.Conv2D(32, 64, kernel_size=(3, 3), padding=1)
        self.conv3 = paddle.nn.Conv2D(64, 64, kernel_size=(3, 3), padding=1)
        self.pool = paddle.nn.MaxPool2D(kernel_size=2, stride=2)
        self.linear1 = paddle.nn.Linear(in_features=256, out_features=64)
        self.linear2 = paddle.nn.Linear(in_features=64, out_features=num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = functional.relu(self.conv3(x))
        x = functional.relu(self.linear1(paddle.flatten(x, 1)))
        return self.linear2(x)


def network() -> paddle.nn.Layer:
    """Build the model."""
    return MyNet(num_classes=10).to(dtype=DTYPE)


def optimizer_of(model: paddle.nn.Layer) -> paddle.optimizer.Optimizer:
    """Make the original's optimizer."""
    return paddle.optimizer.Adam(learning_rate=RATE, parameters=model.parameters())


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of samples whose largest output is that of their class."""
    return float((predictions.argmax(1) == targets).mean())


def sampler_order(epoch: int) -> list[int]:
    """Return the order of an epoch by `DistributedBatchSampler`, over all ranks together.

    The sampler gives rank r the r-th share of each global batch, so update k of all ranks takes the samples
    [96 k, 96 (k + 1)) of this order for every number of ranks.
    """
    sampler = DistributedBatchSampler(range(TRAINING_SAMPLES), GLOBAL_BATCH, num_replicas=1, rank=0, shuffle=True)
    sampler.set_epoch(epoch)
    return [index for batch in sampler for index in batch]


ORDER = None if "--own-order" in sys.argv else sampler_order
"""None, mtrain's own order, with `--own-order`."""
