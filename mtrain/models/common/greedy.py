"""Greedy suppression as a compiled loop, where there is a C compiler; it keeps the boxes that numpy's keeps."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from mtrain.core.compiling import CannotCompileError, compile_library
from mtrain.core.interfaces import Array

SOURCE = Path(__file__).with_name("greedy.c")
APART = "-ffp-contract=off"
"""Flag that keeps a product and a sum two roundings, as they are in numpy."""
Loop = Callable[[Array, Array, Array, float, int], Array]
"""Takes corners (4, N) float32, areas (N,) float32 and classes (N,) int32, best score first, the threshold and the largest number of boxes
to keep; returns the places (K,) of those that remain."""


@cache
def load() -> Loop | None:
    """Load the loop into this process, after compiling it where that was not done before; None if that cannot be."""
    try:
        function = ctypes.CDLL(str(compile_library(SOURCE, APART))).mtrain_greedy_suppress
    except (CannotCompileError, OSError, AttributeError):
        return None
    address, size = ctypes.c_void_p, ctypes.c_long
    function.argtypes = (address, address, address, size, ctypes.c_float, size, address, address)
    function.restype = size

    def loop(corners_4N: Array, areas_N: Array, classes_N: Array, threshold: float, max_kept: int) -> Array:
        alive, kept = np.ones(len(areas_N), np.uint8), np.empty(min(len(areas_N), max(max_kept, 0)), np.int_)
        addresses = (corners_4N.ctypes.data, areas_N.ctypes.data, classes_N.ctypes.data, len(areas_N))
        count = function(*addresses, threshold, len(kept), alive.ctypes.data, kept.ctypes.data)
        return kept[:count]

    return loop if _works(loop) else None


def _works(loop: Loop) -> bool:
    """Return whether a small example comes out right, so that a miscompiled library is never used."""
    corners = np.array([[0, 1, 1, 20], [0, 1, 1, 20], [10, 11, 11, 30], [10, 11, 11, 30]], np.float32)
    areas, classes = np.full(4, 100, np.float32), np.array([0, 0, 1, 0], np.int32)
    found = [loop(corners, areas, classes, 0.5, 9).tolist(), loop(corners, areas, classes, 0.9, 2).tolist()]
    return found == [[0, 2, 3], [0, 1]]
