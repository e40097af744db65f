"""The numbers of two trainings that are the same in torch and in Paddle: data, start weights, and the order of samples."""

from typing import Any

import numpy as np

SAMPLES, BATCH, UPDATES = 64, 8, 10
LAYERS = ((8, 16), (16, 16), (16, 4))


def _spread(count: int, seed: int) -> Any:
    """Return numbers from -1 to 1 in no order. numpy.random would do, but its import after that of Paddle 2.6 crashes."""
    numbers = np.arange(1, count + 1, dtype=np.float64) * (12.9898 + seed)
    return np.sin(numbers * 78.233)


def data() -> tuple[Any, Any]:
    images = 2 * _spread(SAMPLES * 8, 1).reshape(SAMPLES, 8)
    return images.astype("float32"), (2 + 2 * _spread(SAMPLES, 2)).astype("int64") % 4


def start() -> list[tuple[Any, Any]]:
    """Return (weight, bias) of each layer; a weight is outputs by inputs, as torch has it."""
    return [
        (
            (_spread(outputs * inputs, 3 + place).reshape(outputs, inputs) * 1.5 / inputs**0.5).astype("float32"),
            (_spread(outputs, 7 + place) / 8).astype("float32"),
        )
        for place, (inputs, outputs) in enumerate(LAYERS)
    ]


def chosen(update: int, *, shuffled_anew: bool = True) -> Any:
    """Return the samples of an update on all ranks."""
    epoch, place = divmod(update, SAMPLES // BATCH)
    order = np.argsort(_spread(SAMPLES, 11 + (epoch if shuffled_anew else 0)))
    return order[place * BATCH : (place + 1) * BATCH]
