"""Rows of tokens for the loader, each a function of its number."""

import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.samples.sampler import Shuffled
from mtrain_language.packing import Rows


class RowSource:
    """One split as samples. Implements ``Source`` of ``core.interfaces``.

    In training each sample carries a scale: the rows of a global batch have different numbers of labels, and the loss of an
    update is the mean over all of them, however they are divided among ranks and micro batches. Which rows a global batch
    has is known to everybody, so no rank has to ask another one.
    """

    def __init__(self, rows: Rows, *, order: Shuffled | None = None) -> None:
        """``order``: which rows each update trains; None: nothing is trained."""
        self._rows = rows
        self._counts = rows.counts
        self._order = order

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, epoch: int, index: int, *, update: int = 0) -> tuple[int, float]:
        """Return the number of a row, and the factor of its losses: one over the mean number of labels in a row of the
        global batch."""
        if self._order is None:
            return index, 1.0
        counts = self._counts[self._order.global_batch_indices(epoch, update)]
        return index, float(len(counts) / counts.sum())

    def collate(self, samples: Sequence[tuple[int, float]]) -> dict[str, Array]:
        """Join samples: ``tokens``, ``positions`` and ``labels`` int64 (B, L), ``scale`` float64 (B,), ``index`` int64 (B,)."""
        indices = np.array([index for index, _ in samples], dtype=np.int64)
        return {
            "tokens": self._rows.tokens[indices].astype(np.int64),
            "positions": self._rows.positions[indices].astype(np.int64),
            "labels": self._rows.labels[indices].astype(np.int64),
            "scale": np.array([scale for _, scale in samples], dtype=np.float64),
            "index": indices,
        }

    @cached_property
    def fingerprint(self) -> int:
        """Return a number that differs for other rows."""
        tokens, labels = (np.ascontiguousarray(x).data for x in (self._rows.tokens, self._rows.labels))
        return zlib.crc32(labels, zlib.crc32(tokens))
