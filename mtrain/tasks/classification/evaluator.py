"""Accuracy over all ranks and every picture once: overall, by class, and what is taken for what."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import HostBatch
from mtrain.tasks.classification.labels import LabelledPictures

_NAMED = 5
"""As many kinds of mistakes are told."""


class ClassEvaluator:
    """Implements ``core.interfaces.Evaluator`` for classification.

    ``accuracy``: share of the pictures whose surest class is the given one (top-1). ``balanced_accuracy``: mean over classes of
    ``accuracy/<class>``, the share among the pictures of one class (its recall).
    """

    figures: ClassVar[Sequence[str]] = ("accuracy", "balanced_accuracy", "score")
    headline: ClassVar[Sequence[str]] = ("accuracy", "balanced_accuracy")

    def __init__(self, split: LabelledPictures) -> None:
        self._split = split
        self._found: dict[int, NDArray[np.float32]] = {}
        self.confusion = np.zeros((len(split.class_names),) * 2, dtype=np.int64)
        """(C, C) pictures of the last result by given (row) and predicted class (column)."""

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Take one micro batch: ``batch["index"]`` int64 (B,), and B arrays (C,) of probabilities. A picture seen before is left out."""
        for index, probabilities_C in zip(batch["index"], predictions, strict=True):
            self._found.setdefault(int(index), np.asarray(probabilities_C, np.float32))

    def partial(self) -> dict[int, NDArray[np.float32]]:
        """Probabilities (C,) of this rank by sample index."""
        return self._found

    def result(self, partials: Sequence[Mapping[int, NDArray[np.float32]]]) -> dict[str, float]:
        """``score`` (the accuracy), ``accuracy``, ``balanced_accuracy``, and ``accuracy/<class>`` of classes that occur."""
        union = {index: found for partial in partials for index, found in partial.items()}
        self.confusion = np.zeros_like(self.confusion)
        if union:
            indices = np.array(sorted(union))
            predicted = np.stack([union[index] for index in indices]).argmax(axis=1)
            np.add.at(self.confusion, (self._split.labels[indices], predicted), 1)
        given, right = self.confusion.sum(axis=1), self.confusion.diagonal()
        by_class = {
            name: float(right[label] / given[label])
            for label, name in enumerate(self._split.class_names)
            if given[label]
        }
        accuracy = float(right.sum() / max(given.sum(), 1))
        balanced = float(np.mean(list(by_class.values()))) if by_class else 0.0
        figures = {"score": accuracy, "accuracy": accuracy, "balanced_accuracy": balanced}
        return figures | {f"accuracy/{name}": share for name, share in by_class.items()}

    def remarks(self) -> list[str]:
        """Which classes are taken for which others most often."""
        mistakes = self.confusion - np.diag(self.confusion.diagonal())
        count = int(mistakes.sum())
        if not count:
            return []
        order = np.argsort(-mistakes, axis=None, kind="stable")[:_NAMED]
        pairs = [
            (int(given), int(taken)) for given, taken in zip(*np.unravel_index(order, mistakes.shape), strict=True)
        ]
        names = self._split.class_names
        told = [
            f"{names[given]} for {names[taken]} ({mistakes[given, taken]})"
            for given, taken in pairs
            if mistakes[given, taken]
        ]
        return [f"mistakes: {count} of {self.confusion.sum()}, most often {', '.join(told)}"]
