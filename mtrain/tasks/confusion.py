"""The matrix of true and predicted classes, as tasks add it to the pages of a run."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces.details import Matrix

_NAMED = 5
"""Number of confusions that remarks list."""
MAX_CLASSES = 40
"""Largest number of classes of a matrix that have a row of their own."""


def most_confused(counts_CC: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return true class, predicted class and number of samples of the most frequent mistakes."""
    mistakes = counts_CC - np.diag(counts_CC.diagonal())
    # A stable sort, so that confusions of equal number are named in the order of the classes in every run.
    order = np.argsort(-mistakes, axis=None, kind="stable")[:_NAMED]
    pairs = (divmod(int(place), len(mistakes)) for place in order)
    return [(true, predicted, int(mistakes[true, predicted])) for true, predicted in pairs if mistakes[true, predicted]]


def confusion(
    title: str, names: Sequence[str], counts_CC: NDArray[np.int64], *, unit: str, absent: str | None = None
) -> Matrix:
    """Return the matrix of true (rows) and predicted classes (columns).

    Args:
        title: Heading of the matrix.
        names: Names of the classes.
        counts_CC: Number of samples by true and predicted class; with ``absent`` one row and column more.
        unit: What is counted, in the plural.
        absent: Name of the last row and column, of samples without a class on one side; None: there is none.
    """
    count = len(names)
    note = f"number of {unit}; in a row, the {unit} of one true class"
    labels = [*names, *([absent] if absent else [])]
    if count > MAX_CLASSES:
        # Of many classes, those that occur most often get rows of their own
        # and the rest is added up in one: a thousand rows fit on no page.
        frequency = counts_CC.sum(axis=1)[:count]
        kept = np.sort(np.argsort(-frequency, kind="stable")[:MAX_CLASSES])
        groups = np.full(len(labels), MAX_CLASSES)
        groups[kept] = np.arange(MAX_CLASSES)
        if absent:
            groups[count] = MAX_CLASSES + 1
        reduced = np.zeros((MAX_CLASSES + 1 + bool(absent),) * 2, dtype=np.int64)
        np.add.at(reduced, (groups[:, None], groups[None, :]), counts_CC)
        counts_CC = reduced
        labels = [names[i] for i in kept] + [f"{count - MAX_CLASSES} other classes", *([absent] if absent else [])]
    return Matrix(
        title=title,
        note=note,
        rows_title="true",
        columns_title="predicted",
        rows=labels,
        columns=labels,
        counts=counts_CC.tolist(),
    )
