"""Compute how often each training image is drawn, by the classes of its boxes: YOLOv5's image weights."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import Annotations

LEAST = 1e-4
"""Smallest value of (1 - AP)^2, so that a class that is found without a mistake is still trained."""


class ImageWeights:
    """The weight of each image: the sum over its boxes of (1 - AP of the class)^2 / number of boxes of the class.

    AP is that of IoU 0.50:0.95 in the last evaluation; 0 before the first one, and the mean over classes for a class that
    the evaluation split lacks. An image without boxes has weight 0.

    Raises:
        DataError: no image has a box.
    """

    def __init__(self, annotations: Annotations) -> None:
        labels = [sample.targets[1] for sample in annotations.samples]
        self._names = annotations.class_names
        self._labels = np.concatenate([*labels, np.zeros(0, dtype=np.int64)])
        self._images = np.repeat(np.arange(len(labels)), [len(one) for one in labels])
        self._length = len(labels)
        if not len(self._labels):
            raise DataError(
                "data.image_weights: true, but no training image has a box, so none could be drawn; set it to false"
            )
        self._boxes = np.bincount(self._labels, minlength=len(self._names))

    def at(self, metrics: Mapping[str, float]) -> NDArray[np.float64]:
        """Return the weights (images,) after an evaluation with these metrics; before the first one they are empty."""
        overall = metrics.get("AP", 0.0)
        # A class that the evaluation split lacks has no AP of its own: the mean over classes stands for it.
        precision = np.array([metrics.get(f"AP/{name}", overall) for name in self._names], dtype=np.float64)
        lacking = np.maximum((1.0 - np.clip(precision, 0.0, 1.0)) ** 2, LEAST)
        of_class = lacking / np.maximum(self._boxes, 1)
        sums = np.bincount(self._images, weights=of_class[self._labels], minlength=self._length)
        return sums.astype(np.float64, copy=False)
