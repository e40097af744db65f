"""Digest a set of arrays, so that equal digests mean equal arrays to the last bit."""

import hashlib
from collections.abc import Mapping

import numpy as np

from mtrain.core.interfaces import Array


def digest(arrays: Mapping[str, Array]) -> str:
    """Return the hexadecimal SHA-256 of names, types, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        total.update(array.tobytes())
    return total.hexdigest()
