"""Compute accuracy over all ranks, counting every image once: overall, by class, and the most frequent confusions."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import HostBatch
from mtrain.core.interfaces.details import Detail
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.confusion import confusion, most_confused


class ClassEvaluator:
    """Implements ``core.interfaces.Evaluator`` for classification.

    ``accuracy``: share of the images whose most probable class is the true one (top-1). ``balanced_accuracy``: mean
    over classes of ``accuracy/<class>``, the share among the images of one class (its recall)."""

    metrics: ClassVar[Sequence[str]] = ("accuracy", "balanced_accuracy", "score")
    headline: ClassVar[Sequence[str]] = ("accuracy", "balanced_accuracy")

    def __init__(self, split: LabelledImages) -> None:
        self._split = split
        self._predictions: dict[int, NDArray[np.float32]] = {}
        self.confusion = np.zeros((len(split.class_names),) * 2, dtype=np.int64)
        """(C, C) number of images of the last result by true (row) and predicted class (column)."""

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Add the predictions of one micro batch: ``batch["index"]`` int64 (B,), and B arrays (C,) of probabilities."""
        for index, probabilities_C in zip(batch["index"], predictions, strict=True):
            # The last micro batches are filled up with the first samples
            # (``core.samples.sampler.Padded``), which count once.
            self._predictions.setdefault(int(index), np.asarray(probabilities_C, np.float32))

    def partial(self) -> dict[int, NDArray[np.float32]]:
        """Return the probabilities (C,) of this rank by sample index."""
        return self._predictions

    def result(self, partials: Sequence[Mapping[int, NDArray[np.float32]]]) -> dict[str, float]:
        """Return ``score`` (the accuracy), ``accuracy``, ``balanced_accuracy``, and ``accuracy/<class>`` of classes
        that occur."""
        union = {index: probabilities for partial in partials for index, probabilities in partial.items()}
        self.confusion = np.zeros_like(self.confusion)
        if union:
            # By number: which rank evaluated an image must not matter to the order in which numbers are added.
            indices = np.array(sorted(union))
            predicted = np.stack([union[index] for index in indices]).argmax(axis=1)
            np.add.at(self.confusion, (self._split.labels[indices], predicted), 1)
        true_counts, correct_counts = self.confusion.sum(axis=1), self.confusion.diagonal()
        by_class = {
            name: float(correct_counts[label] / true_counts[label])
            for label, name in enumerate(self._split.class_names)
            # A class that does not occur has no recall, and must not pull the mean down.
            if true_counts[label]
        }
        accuracy = float(correct_counts.sum() / max(true_counts.sum(), 1))
        balanced = float(np.mean(list(by_class.values()))) if by_class else 0.0
        metrics = {"score": accuracy, "accuracy": accuracy, "balanced_accuracy": balanced}
        return metrics | {f"accuracy/{name}": share for name, share in by_class.items()}

    def remarks(self) -> list[str]:
        """Report the most frequent confusions between classes."""
        names, total = self._split.class_names, self.confusion.sum()
        parts = [f"{names[true]} for {names[found]} ({count})" for true, found, count in most_confused(self.confusion)]
        count = total - self.confusion.trace()
        return [f"mistakes: {count} of {total}, most often {', '.join(parts)}"] if parts else []

    def details(self) -> list[Detail]:
        """Return the confusion matrix of the last result."""
        return [confusion("Confusion", self._split.class_names, self.confusion, unit="images")]
