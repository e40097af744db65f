"""The ``digits_classes`` data set: scikit-learn's 8 x 8 images of handwritten digits, for classification.

UCI "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), 1797 images, CC BY 4.0. Nothing is
downloaded.
"""

from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mtrain.core.interfaces import Dataset, PluginOptions, SplitRequest
from mtrain.data.images.handwritten import handwritten_digits
from mtrain.errors import DataError
from mtrain.tasks.classification.labels import LabelledImages

NAMES = tuple(str(digit) for digit in range(10))
_FULL_INK = 16
"""Largest value in the set: full ink."""


class DigitsClassesOptions(PluginOptions):
    """How the images are divided into training and evaluation."""

    val_every: int = Field(default=5, ge=2, description="n: every n-th image, from image 0 on, is for evaluation")


class DigitsClasses(Dataset):
    """The ``digits_classes`` data set plugin."""

    kind: ClassVar[str] = "classification"
    Options = DigitsClassesOptions

    options: DigitsClassesOptions

    def read(self, request: SplitRequest) -> LabelledImages:
        """Read one split: white ink on black.

        Raises:
            DataError: a path is set, or there are not ten names.
        """
        paths = {"data.root": request.root, f"data.{request.split}": request.value, "data.images": request.images}
        # A path that is silently ignored would let users believe that their own images are trained.
        set_keys = [key for key, value in paths.items() if value is not None]
        if set_keys:
            raise DataError(f"{', '.join(set_keys)}: given, but digits_classes comes with scikit-learn; leave it out")
        if request.names is not None and len(request.names) != len(NAMES):
            raise DataError(
                f"data.names: {len(request.names)} given, expected {len(NAMES)}, for the digits from 0 to 9"
            )
        pixels, labels = _all_digits()
        is_val = np.arange(len(labels)) % self.options.val_every == 0
        wanted = {"train": ~is_val, "all": np.ones_like(is_val)}.get(request.split, is_val)
        chosen = np.flatnonzero(wanted)
        return LabelledImages(
            images=pixels[chosen],
            labels=labels[chosen],
            class_names=tuple(request.names or NAMES),
            origins=[f"digit {i}" for i in chosen],
        )


@cache
def _all_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images (N, 8, 8, 3) and labels (N,), in the order of the set."""
    images, classes = handwritten_digits()
    grey = np.rint(images * (255 / _FULL_INK)).astype(np.uint8)
    # Everything behind a reader takes RGB, so the grey value stands in all three channels.
    return np.repeat(grey[..., None], 3, axis=3), classes
