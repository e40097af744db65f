"""Anonymous shared memory: pages visible to a process and to the workers that it forks later.

Nothing appears in /dev/shm and nothing can leak: the pages are freed when the last process ends. Pages are allocated
when first written, so a generous size costs nothing."""

import math
import mmap
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain.core.interfaces import Array

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux flag; Python names it only from version 3.13 on."""
LEAST_BYTES = 64 << 20
"""Smallest size to which a ring is reduced, in bytes."""


def shared_bytes(size: int) -> NDArray[np.uint8]:
    """Return ``size`` zero bytes that forked children share. They live as long as a view of them."""
    # Without MAP_NORESERVE, a system that does not overcommit would count pages that are never written.
    area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
    return np.frombuffer(area, dtype=np.uint8)[:size]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Name, largest shape and type of the one array of each sample that travels through shared memory."""

    name: str
    """Key of the array in the batch."""
    shape: tuple[int, ...]
    """Shape of one sample; a batch has one more axis in front."""
    dtype: str = "uint8"

    @property
    def nbytes(self) -> int:
        """Return the size of one sample's array in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Ring:
    """Places for ``capacity`` samples in a row. A micro batch takes neighbouring places, so it is one array.

    A micro batch of smaller samples lies packed at the beginning of its places.
    """

    def __init__(self, spec: ArraySpec, capacity: int) -> None:
        self.spec = spec
        self.capacity = capacity
        self._bytes = shared_bytes(spec.nbytes * capacity)

    @classmethod
    def within(cls, spec: ArraySpec, nbytes: int) -> "Ring":
        """Create a ring as large as ``nbytes`` allows, or smaller where the system limits address space."""
        while True:
            try:
                return cls(spec, max(nbytes // spec.nbytes, 1))
            except OSError:
                if nbytes <= LEAST_BYTES:
                    raise
                nbytes //= 2

    def place(self, start: int, position: int, shape: tuple[int, ...]) -> Array:
        """Return the writable array of sample ``position`` of the micro batch that begins at place ``start``."""
        view: Array = self.places(start, position + 1, shape)[position]
        return view

    def places(self, start: int, count: int, shape: tuple[int, ...]) -> Array:
        """Return a micro batch as (count, ...): samples of ``shape``, which is no larger than the spec's."""
        size = math.prod(shape) * np.dtype(self.spec.dtype).itemsize
        assert size <= self.spec.nbytes, f"{shape} is larger than a place, {self.spec.shape}"
        first = start * self.spec.nbytes
        return self._bytes[first : first + count * size].view(self.spec.dtype).reshape(count, *shape)
