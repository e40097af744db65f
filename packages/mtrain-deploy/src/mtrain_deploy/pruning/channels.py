"""The identities of channels: which channels of which layers are one and can only be removed together."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""One identity per channel, int64 (C,)."""
FIXED = 0
"""The identity of every channel that must stay."""


class Channels:
    """Sets of channels that are tied to each other: a disjoint-set forest over identities."""

    def __init__(self) -> None:
        """Start with the set of the channels that must stay."""
        self._parents = [FIXED]

    def new(self, count: int) -> Ids:
        """Return identities for ``count`` new channels, tied to nothing."""
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count, dtype=np.int64)

    def new_fixed(self, count: int) -> Ids:
        """Return identities for ``count`` channels that must stay."""
        return np.full(count, FIXED, np.int64)

    def tie(self, ones: Sequence[int] | Ids, others: Sequence[int] | Ids) -> None:
        """Have each of ``ones`` removed only together with its counterpart in ``others``."""
        for one, other in zip(ones, others, strict=True):
            first, second = self.root(int(one)), self.root(int(other))
            # The smaller number becomes the root, so that FIXED stays one and sets are numbered in the model's order.
            self._parents[max(first, second)] = min(first, second)

    def fix(self, ids: Sequence[int] | Ids) -> None:
        """Have the channels ``ids`` stay."""
        self.tie(ids, self.new_fixed(len(ids)))

    def root(self, number: int) -> int:
        """Return the identity that stands for the whole set of ``number``."""
        while self._parents[number] != number:
            # Halving the paths keeps them short: networks tie thousands of channels in long chains.
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def roots(self, ids: Ids) -> Ids:
        """Return the identity of each channel's set."""
        return np.array([self.root(int(number)) for number in ids], np.int64)
