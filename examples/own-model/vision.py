"""A small vision transformer of the library transformers, with dropout, on scikit-learn's handwritten digits."""

import numpy as np
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification


class Digits:
    """Images of 8 x 8, moved by up to one pixel at random in training."""

    def __init__(self, split: str = "train") -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = (np.arange(len(labels)) % 6 != 0) == (split == "train")
        self.images, self.labels = images[chosen].reshape(-1, 1, 8, 8) / 16, labels[chosen]
        self.moves = split == "train"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image = self.images[index].astype(np.float32)
        if self.moves:
            image = np.roll(image, np.random.randint(-1, 2, 2), (1, 2))
        return image, int(self.labels[index])


class Vit(nn.Module):
    """The classifier of transformers, built from a configuration."""

    def __init__(self, width: int = 32, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        config = ViTConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=2 * width,
            image_size=8, patch_size=2, num_channels=1, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, num_labels=10, attn_implementation="eager",
        )  # fmt: skip
        self.net = ViTForImageClassification(config)

    def forward(self, batch: tuple[Tensor, Tensor]):
        """Return the model's output; its ``loss`` is the mean over the batch."""
        return self.net(pixel_values=batch[0], labels=batch[1])

    def predict(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the score of each class, and the true class."""
        return self.net(pixel_values=batch[0]).logits, batch[1]
