"""Digest a set of arrays, so that equal digests mean equal arrays to the last bit."""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from mtrain.core.interfaces import Array, Part, StateStream


def digest(arrays: Mapping[str, Array]) -> str:
    """Return the hexadecimal SHA-256 of names, types, shapes and bytes, in the order of the names."""
    return _digest((name, arrays[name]) for name in sorted(arrays))


def digest_of_stream(stream: StateStream, part: Part) -> str:
    """Return the ``digest`` of one part of a state, on rank 0. Every rank must call."""
    names = sorted(stream.outlines[part])
    pairs = zip(names, stream.arrays(part, names), strict=True)
    return _digest((name, array) for name, array in pairs if array is not None)


def _digest(arrays: Iterable[tuple[str, Array]]) -> str:
    total = hashlib.sha256()
    for name, values in arrays:
        array = np.ascontiguousarray(values)
        total.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        total.update(array.data)
    return total.hexdigest()
