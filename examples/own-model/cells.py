"""Rows that describe cells of a tumour, and whether it is malignant: scikit-learn's copy of a public data set."""

import numpy as np
from sklearn.datasets import load_breast_cancer


class Cells:
    """The rows of one split, normalised."""

    def __init__(self, split: str = "train", noise: float = 0.0) -> None:
        rows, self.targets = load_breast_cancer(return_X_y=True)
        rows = ((rows - rows.mean(0)) / rows.std(0)).astype(np.float32)
        chosen = np.arange(len(rows)) % 5 != 0 if split == "train" else np.arange(len(rows)) % 5 == 0
        self.rows, self.targets = rows[chosen], self.targets[chosen]
        self.noise = noise if split == "train" else 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        row = self.rows[index] + np.random.randn(30).astype(np.float32) * np.float32(self.noise)
        return row, int(self.targets[index])
