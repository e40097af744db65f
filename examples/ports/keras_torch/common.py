"""Model and data of a training with Keras 3 on torch, and the order of its samples; shared by plain.py and port.py.

Data: the handwritten digits of scikit-learn (8 x 8 pixels) in place of MNIST. Global batch: 96 samples, for 1, 2 and 3 ranks.
With `--fp64` Keras computes in float64; port.py needs `-o train.precision=fp64` besides. With `--dropout` the model has a layer of dropout.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

GLOBAL_BATCH, EPOCHS, SEED, RATE = 96, 3, 42, 0.001
TRAINING_SAMPLES = 1440

if "--fp64" in sys.argv:
    keras.config.set_floatx("float64")
DTYPE = getattr(torch, keras.config.floatx())


class Digits(Dataset):
    """Images (8, 8, 1) and their classes."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        part = slice(0, TRAINING_SAMPLES) if train else slice(TRAINING_SAMPLES, None)
        self.images = torch.from_numpy(digits.images[part, ..., None] / 16).to(DTYPE)
        self.classes = torch.from_numpy(digits.target[part])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]


def network() -> keras.Model:
    """Build the model of the guide, for smaller images.

    Its last layer is a convolution of one pixel in the place of ``Dense``, whose products Keras 3.15 rounds to float32 on torch.
    """
    return keras.Sequential(
        [
            keras.layers.Input(shape=(8, 8, 1)),
            keras.layers.Conv2D(16, kernel_size=(3, 3), activation="relu", name="first"),
            keras.layers.MaxPooling2D(pool_size=(2, 2)),
            keras.layers.Conv2D(32, kernel_size=(3, 3), activation="relu", name="second"),
            keras.layers.Dropout(0.5 if "--dropout" in sys.argv else 0.0),
            keras.layers.Conv2D(10, kernel_size=(1, 1), name="classes"),
            keras.layers.Flatten(),
        ]
    )


def accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return the share of samples whose largest output is that of their class."""
    return float((predictions.argmax(1) == targets).mean())


def order(epoch: int) -> list[int]:
    """Return the order of an epoch."""
    generator = torch.Generator()
    generator.manual_seed(epoch)
    return torch.randperm(TRAINING_SAMPLES, generator=generator).tolist()
