"""The documents of one split, as readers return them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Document:
    """One text."""

    text: str
    prompt: str = ""
    """What stands before the text and is read, but not learned."""
    messages: tuple[Mapping[str, str], ...] = ()
    """In the place of both: the turns of a conversation, each with ``role`` and ``content``."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of one split, in the order of their files."""

    items: Sequence[Document]
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def divide(self, share: float, *, seed: int) -> "tuple[Documents, Documents]":
        """Return documents for training, and ``share`` of them, at least one, for evaluation."""
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(self.items))
        # At least one document is left on each side, whatever the share.
        count = min(max(round(share * len(order)), 1), max(len(order) - 1, 0))
        chosen = {int(place) for place in order[:count]}
        return (
            Documents([item for place, item in enumerate(self.items) if place not in chosen]),
            Documents([item for place, item in enumerate(self.items) if place in chosen]),
        )
