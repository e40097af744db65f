"""The compiled kernels as functions of memory addresses, which any framework's tensors can give."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mtrain.backends._kernels.compiling import CannotCompileError, compiled

SOURCE = Path(__file__).with_name("norm.c")
_ADDRESS, _SIZE, _FLAG = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_SIGNATURES = {
    "statistics": (_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _FLAG),
    "output": (_ADDRESS, _SIZE, _SIZE, *[_ADDRESS] * 4, _FLAG, _ADDRESS, _FLAG),
    "gradient_sums": (_ADDRESS, _ADDRESS, *[_SIZE] * 3, *[_ADDRESS] * 4, _FLAG, _ADDRESS, _ADDRESS, _FLAG),
    "input_gradient": (_ADDRESS, _ADDRESS, *[_SIZE] * 3, *[_ADDRESS] * 5, _FLAG),
}
"""Types of the arguments; ``norm.c`` documents each function."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """BatchNorm with and without SiLU; the arguments are those of ``mtrain_norm_<name>`` in ``norm.c``.

    Each raises MemoryError if there is no memory for its sums.
    """

    statistics: Callable[..., None]
    output: Callable[..., None]
    gradient_sums: Callable[..., None]
    input_gradient: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What ``load`` found: the kernels, or why there are none."""

    kernels: Kernels | None
    reason: str = ""


@cache
def load() -> Loaded:
    """Load the kernels into this process, after compiling them where that was not done before; a second at most."""
    try:
        library = ctypes.CDLL(str(compiled(SOURCE)))
        kernels = Kernels(**{name: _function(library, name) for name in _SIGNATURES})
        _check(kernels)
    except (CannotCompileError, OSError, AttributeError) as error:
        return Loaded(None, str(error))
    return Loaded(kernels)


def _function(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    function = getattr(library, f"mtrain_norm_{name}")
    function.argtypes = _SIGNATURES[name]
    function.restype = ctypes.c_int

    def call(*arguments: float | None) -> None:
        if function(*arguments) != 0:
            raise MemoryError("no memory for the sums of a BatchNorm")

    return call


def _check(kernels: Kernels) -> None:
    """Compute a small example, so that a miscompiled library is never used.

    Raises:
        CannotCompileError: The result is wrong.
    """
    pixels, channels = 500, 5
    x = np.sin(np.arange(pixels * channels, dtype=np.float32)).reshape(pixels, channels) * 3 + 1
    moments, y = np.empty((2, channels)), np.empty_like(x)
    weight, bias = np.linspace(0.5, 1.5, channels, dtype=np.float32), np.linspace(-1, 1, channels, dtype=np.float32)
    kernels.statistics(x.ctypes.data, pixels, channels, moments[0].ctypes.data, moments[1].ctypes.data, 1)
    inverse = 1 / np.sqrt(moments[1] + 1e-3)
    addresses = (moments[0].ctypes.data, inverse.ctypes.data, weight.ctypes.data, bias.ctypes.data)
    kernels.output(x.ctypes.data, pixels, channels, *addresses, 1, y.ctypes.data, 1)
    exact = x.astype(np.float64)
    z = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-3) * weight + bias
    if not np.allclose(y, z / (1 + np.exp(-z)), rtol=1e-5, atol=1e-6):
        raise CannotCompileError("the compiled kernels give wrong results here")
