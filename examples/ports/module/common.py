"""A module in the form of Lightning's, and its data; shared by its scripts.

Data: the handwritten digits of scikit-learn (8 x 8 pixels). With `--fp64`, plain.py computes in float64; for port.py,
`-o train.precision=fp64` does.
"""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

try:
    from lightning import LightningModule as Base
except ImportError:  # the methods that are used here are the module's own
    Base = nn.Module

GLOBAL_BATCH, EPOCHS, SEED = 36, 3, 29
DTYPE = torch.float64 if "--fp64" in sys.argv else torch.float32


class Digits(Dataset):
    """Images (64,) from 0 to 1, and their classes."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        part = slice(720) if train else slice(720, 1080)
        self.images = torch.tensor(digits.data[part] / 16, dtype=DTYPE)
        self.classes = torch.tensor(digits.target[part])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]


class Classifier(Base):
    """A classifier that knows its own loss, optimizer and schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.to(DTYPE)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.layers(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        images, classes = batch
        return functional.cross_entropy(self(images), classes)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return predicted and true classes of a batch."""
        images, classes = batch
        return self(images).argmax(1), classes

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer and its scheduler, which is stepped after each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
