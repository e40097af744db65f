"""A small detector-like network and its data: what the contract tests train."""

from typing import Any

import numpy as np

SAMPLES, SIDE, CLASSES = 48, 8, 4


def data() -> tuple[np.ndarray, np.ndarray]:
    """48 pictures (float64, N3HW) and their classes; the first ones are loud, so that some updates are clipped."""
    generator = np.random.default_rng(7)
    pictures = generator.normal(size=(SAMPLES, 3, SIDE, SIDE))
    return pictures, generator.integers(0, CLASSES, SAMPLES)


def build(drop: Any = None) -> Any:
    """A new network on the bound framework; ``drop``: a native dropout layer before its head."""
    from tests.contract.network import ConvNet

    return ConvNet(drop)
