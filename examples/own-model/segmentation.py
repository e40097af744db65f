"""A small network that finds the pixels of discs: plain torch, with two losses and images that are drawn on the fly."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import Dataset


class Discs(Dataset):
    """Noisy images of one disc each, and the mask of its pixels."""

    def __init__(self, split: str = "train", samples: int = 96, side: int = 16) -> None:
        self.samples, self.side = samples if split == "train" else samples // 4, side
        self.first = 0 if split == "train" else 10_000

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = torch.Generator().manual_seed(self.first + index)  # where the disc is belongs to the sample
        x, y, radius = (torch.rand(3, generator=place) * torch.tensor([self.side, self.side, 4.0])).tolist()
        rows, columns = torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij")
        mask = ((rows - y) ** 2 + (columns - x) ** 2 <= (radius + 2) ** 2).float()[None]
        return {"image": mask + 0.3 * torch.randn(mask.shape), "mask": mask}  # mtrain has seeded torch for the noise


class Segmenter(nn.Module):
    """Three convolutions; trained on cross-entropy and overlap."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1)
        )

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss to minimise under ``total``, and its two parts to be reported."""
        logits, mask = self.layers(batch["image"]), batch["mask"]
        entropy = binary_cross_entropy_with_logits(logits, mask)
        shares = logits.sigmoid()
        overlap = (2 * (shares * mask).sum((1, 2, 3)) + 1) / (shares.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
        dice = 1 - overlap.mean()
        return {"total": entropy + dice, "entropy": entropy, "dice": dice}

    def predict(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the pixels that are found, and those that are right."""
        return self.layers(batch["image"]) > 0, batch["mask"] > 0.5


def overlap(predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return intersection over union, and the share of right pixels."""
    return {
        "iou": float((predictions & targets).sum() / (predictions | targets).sum()),
        "pixels": float((predictions == targets).mean()),
    }
