"""A data set without framework: points in eight dimensions, of two classes."""

import numpy as np


class Points:
    def __init__(self, length: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.inputs = generator.normal(size=(length, 8)).astype(np.float32)
        self.targets = (self.inputs[:, :3].sum(1) > 0).astype(np.int64)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        jitter = np.random.normal(scale=0.01, size=8).astype(np.float32)
        return self.inputs[index] + jitter, self.targets[index]


class Plain(Points):
    def __getitem__(self, index: int):
        return self.inputs[index], self.targets[index]


def accuracy(predictions, targets) -> float:
    return float((predictions.argmax(1) == targets).mean())
