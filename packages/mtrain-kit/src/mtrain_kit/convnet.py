"""The small network and the data that the conformance kit trains."""

from typing import Any

import numpy as np

from mtrain.core.interfaces import Array

SAMPLES, SIDE, CLASSES = 48, 8, 4
SHAPES: dict[str, tuple[int, ...]] = {
    "conv1.weight": (6, 3, 3, 3),
    **{f"bn1.{name}": (6,) for name in ("weight", "bias", "running_mean", "running_var")},
    "bn1.num_batches_tracked": (),
    "conv2.weight": (8, 6, 3, 3),
    **{f"bn2.{name}": (8,) for name in ("weight", "bias", "running_mean", "running_var")},
    "bn2.num_batches_tracked": (),
    "head.weight": (CLASSES, 8),
    "head.bias": (CLASSES,),
}
"""Shape of each entry of the network's state by neutral name, in model order."""


def data() -> tuple[Array, Array]:
    """Return 48 images (float64, N3HW) and their classes (int64, N)."""
    generator = np.random.default_rng(7)
    images = generator.normal(size=(SAMPLES, 3, SIDE, SIDE))
    return images, generator.integers(0, CLASSES, SAMPLES)


def build(drop: Any = None) -> Any:
    """Create the network on the bound framework; ``drop``: a native dropout layer before its head."""
    from mtrain_kit.network import ConvNet

    return ConvNet(CLASSES, drop)


def start_weights() -> dict[str, Array]:
    """Return the start value of every entry, float64, BatchNorm statistics included; keyed by name, equal on every
    framework."""
    values: dict[str, Array] = {}
    for name, shape in SHAPES.items():
        generator = np.random.default_rng([11, *name.encode()])
        if name.endswith("num_batches_tracked"):
            values[name] = np.zeros(shape, np.int64)
        elif name.endswith("running_var") or (".weight" in name and "bn" in name):
            values[name] = generator.uniform(0.5, 1.5, shape)
        else:
            values[name] = generator.normal(0, 0.3, shape)
    return values
