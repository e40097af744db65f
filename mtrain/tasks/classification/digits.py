"""The ``digits_classes`` data set: scikit-learn's 8 x 8 pictures of handwritten digits, for classification.

UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), 1797 pictures, CC BY 4.0. Nothing is
downloaded.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Dataset
from mtrain.data.images.handwritten import handwritten_digits
from mtrain.data.reading import Split
from mtrain.errors import DataError
from mtrain.tasks.classification.labels import LabelledPictures

NAMES = tuple(str(digit) for digit in range(10))
_FULL_INK = 16
"""Largest value in the set: full ink."""


class DigitsClassesOptions(BaseModel):
    """How the pictures are divided into training and evaluation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    val_every: int = Field(default=5, ge=2, description="n: every n-th picture, from picture 0 on, is for evaluation")


class DigitsClasses(Dataset):
    """The ``digits_classes`` data set plugin."""

    kind: ClassVar[str] = "classification"
    Options = DigitsClassesOptions

    def __init__(self, options: DigitsClassesOptions | None = None) -> None:
        self.options = options or DigitsClassesOptions()

    def read(
        self,
        root: Path | None,
        split_value: str | None,
        images: str | None,
        names: Sequence[str] | None,
        *,
        split: Split,
    ) -> LabelledPictures:
        """Read one split: white ink on black.

        Raises:
            DataError: a path is set, or there are not ten names.
        """
        paths = {"data.root": root, f"data.{split}": split_value, "data.images": images}
        set_keys = [key for key, value in paths.items() if value is not None]
        if set_keys:
            raise DataError(f"{', '.join(set_keys)}: given, but digits_classes comes with scikit-learn; leave it out")
        if names is not None and len(names) != len(NAMES):
            raise DataError(f"data.names: {len(names)} given, expected {len(NAMES)}, for the digits from 0 to 9")
        pictures, labels = _all_digits()
        is_val = np.arange(len(labels)) % self.options.val_every == 0
        wanted = {"train": ~is_val, "all": np.ones_like(is_val)}.get(split, is_val)
        chosen = np.flatnonzero(wanted)
        return LabelledPictures(
            pictures=pictures[chosen],
            labels=labels[chosen],
            class_names=tuple(names or NAMES),
            origins=[f"digit {i}" for i in chosen],
        )


@cache
def _all_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return pictures (N, 8, 8, 3) and labels (N,), in the order of the set."""
    images, classes = handwritten_digits()
    grey = np.rint(images * (255 / _FULL_INK)).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=3), classes
