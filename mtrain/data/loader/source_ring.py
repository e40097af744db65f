"""A source of samples, and the places of its ring that loaders occupy."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from mtrain.core.interfaces import Array, Source
from mtrain.data.loader.shared_memory import ArraySpec, Ring


class PooledSource(Source, Protocol):
    """A source that writes the large array of each sample straight to shared memory."""

    array: ArraySpec

    def shape(self, epoch: int, update: int) -> tuple[int, ...]:
        """Return the shape of the array in the samples of one update; no larger than ``array.shape``."""
        ...

    def fill(self, epoch: int, index: int, out: Array, *, update: int) -> Any:
        """Prepare a sample like ``sample``, but write its array to ``out``; return the rest, which is small and
        picklable."""
        ...

    def describe(self, index: int) -> str:
        """Name the sample for error messages: its file."""
        ...


@dataclass(slots=True)
class SourceRing:
    """One source with its ring and the places that loaders occupy."""

    number: int
    source: PooledSource
    ring: Ring
    areas: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of each loader's places, in order."""

    def take(self, count: int) -> int | None:
        """Reserve ``count`` neighbouring places and return the first one; None if there is no such gap."""
        start = 0
        for first, end in self.areas:
            if first - start >= count:
                break
            start = end
        if start + count > self.ring.capacity:
            return None
        self.areas.append((start, start + count))
        self.areas.sort()
        return start

    def give_back(self, start: int) -> None:
        """Free the places that ``take`` reserved at ``start``."""
        self.areas = [area for area in self.areas if area[0] != start]
