"""Images of waves in noise, ten directions, as a local plugin: nothing to read, and no library to import."""

from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.tasks.classification.labels import LabelledImages

SIDE, CLASSES = 8, 10
LENGTHS = {"train": 1437, "val": 60, "test": 60}


class Waves(Dataset):
    """``Dataset`` of ``core.interfaces``."""

    class Options(BaseModel):
        """None."""

    kind: ClassVar[str] = "classification"

    def __init__(self, options: BaseModel) -> None:
        del options

    def read(self, request: SplitRequest) -> LabelledImages:
        """One split; the same each time."""
        length = LENGTHS[request.split]
        generator = np.random.default_rng(length)
        labels_N = generator.integers(0, CLASSES, length)
        angles_N11 = (np.pi * labels_N / CLASSES)[:, None, None]
        rows_SS, columns_SS = np.mgrid[:SIDE, :SIDE]
        waves_NSS = np.sin(1.5 * (np.cos(angles_N11) * columns_SS + np.sin(angles_N11) * rows_SS))
        grey_NSS = 128 + 60 * waves_NSS + generator.normal(0, 20, waves_NSS.shape)
        return LabelledImages(
            images=np.repeat(grey_NSS.clip(0, 255).astype(np.uint8)[..., None], 3, axis=3),
            labels=labels_N,
            class_names=tuple(str(label) for label in range(CLASSES)),
            origins=[f"wave {place}" for place in range(length)],
        )
