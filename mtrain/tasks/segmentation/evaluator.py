"""Compute mean IoU over all ranks, counting every image once, from the exact confusion matrix of pixels.

Predictions are compared with the masks in the pixels of the images as they are, not in those of the network's input.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Array, HostBatch
from mtrain.core.interfaces.details import Detail
from mtrain.data.images.drawing import spread
from mtrain.data.images.indexed import IGNORED
from mtrain.tasks.confusion import confusion, most_confused
from mtrain.tasks.segmentation.fitting import Resize, back
from mtrain.tasks.segmentation.masks import MaskedImages

DRAWN = 12
"""Number of images whose predictions are kept to be drawn."""


class MaskEvaluator:
    """Implements ``core.interfaces.Evaluator`` for segmentation.

    ``iou/<class>``: of the pixels that have the class in truth or prediction, the share that has it in both; pixels without
    a class count nowhere. ``miou``: mean over the classes that occur in either. ``pixel_accuracy``: share of all pixels
    with a class that are predicted right.
    """

    metrics: ClassVar[Sequence[str]] = ("miou", "pixel_accuracy", "score")
    headline: ClassVar[Sequence[str]] = ("miou", "pixel_accuracy")

    def __init__(self, split: MaskedImages, *, resize: Resize) -> None:
        self._split = split
        self._resize: Resize = resize
        self._drawn = set(spread(len(split), DRAWN))
        self._counts: dict[int, dict[str, Any]] = {}
        self.confusion = np.zeros((len(split.class_names),) * 2, dtype=np.int64)
        """(C, C) number of pixels of the last result by true (row) and predicted class (column)."""

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Add the predictions of one micro batch: ``batch["index"]`` int64 (B,), and B mappings with ``classes`` uint8
        (S, S).

        Raises:
            DataError: a mask cannot be read.
        """
        for number, prediction in zip(batch["index"], predictions, strict=True):
            index = int(number)
            # The last micro batches are filled up with the first samples (``core.samples.sampler.Padded``).
            if index in self._counts:
                continue
            size_wh = self._split.size(index)
            predicted = back(prediction["classes"], size_wh, resize=self._resize)
            # Counts of pairs travel between ranks in place of whole maps: they are exact, and a thousandth of the size.
            codes, counts = _pairs(self._split.mask(index, size_wh), predicted, len(self._split.class_names))
            drawn = compress(predicted) if index in self._drawn else b""
            self._counts[index] = {"codes": codes, "counts": counts, "drawn": drawn}

    def partial(self) -> dict[int, dict[str, Any]]:
        """Return by sample index the pairs of classes that occur, ``codes`` (true * C + predicted), with their number of
        pixels ``counts``, and for some images the predicted classes, ``drawn``."""
        return self._counts

    def result(self, partials: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[str, float]:
        """Return ``score`` (the mean IoU), ``miou``, ``pixel_accuracy``, and ``iou/<class>`` of classes that occur."""
        union = {index: pairs for partial in partials for index, pairs in partial.items()}
        flat = np.zeros(self.confusion.size, dtype=np.int64)
        for pairs in union.values():
            flat[pairs["codes"]] += pairs["counts"]
        self.confusion = flat.reshape(self.confusion.shape)
        right = self.confusion.diagonal()
        either = self.confusion.sum(axis=0) + self.confusion.sum(axis=1) - right
        by_class = {
            name: float(right[label] / either[label])
            for label, name in enumerate(self._split.class_names)
            # A class that neither the truth nor a prediction has must not pull the mean down.
            if either[label]
        }
        mean = float(np.mean(list(by_class.values()))) if by_class else 0.0
        accuracy = float(right.sum() / max(self.confusion.sum(), 1))
        metrics = {"score": mean, "miou": mean, "pixel_accuracy": accuracy}
        return metrics | {f"iou/{name}": share for name, share in by_class.items()}

    def remarks(self) -> list[str]:
        """Report the most frequent confusions between classes."""
        names, total = self._split.class_names, self.confusion.sum()
        found = most_confused(self.confusion)
        parts = [f"{names[true]} as {names[predicted]} ({count / total:.1%})" for true, predicted, count in found]
        wrong = total - self.confusion.trace()
        return [f"wrong pixels: {wrong / total:.1%} of all, most often {', '.join(parts)}"] if parts else []

    def details(self) -> list[Detail]:
        """Return the confusion matrix of the last result."""
        return [confusion("Confusion", self._split.class_names, self.confusion, unit="pixels")]


def _pairs(
    mask: NDArray[np.uint8], predicted: NDArray[np.uint8], class_count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the codes of the pairs of classes that occur, and their number of pixels."""
    labelled = mask != IGNORED
    codes = mask[labelled].astype(np.int64) * class_count + predicted[labelled]
    counts = np.bincount(codes, minlength=class_count**2)
    occurring = np.flatnonzero(counts)
    return occurring, counts[occurring]


def compress(values: NDArray[np.uint8]) -> bytes:
    """Return a map of bytes as it travels between ranks; see ``expand``."""
    return zlib.compress(np.ascontiguousarray(values).tobytes(), 1)


def expand(content: bytes, size_wh: tuple[int, int]) -> Array:
    """Return the map uint8 (H, W) from which ``compress`` made ``content``."""
    return np.frombuffer(zlib.decompress(content), dtype=np.uint8).reshape(size_wh[1], size_wh[0])
