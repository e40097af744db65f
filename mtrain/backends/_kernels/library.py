"""The compiled kernels as functions of memory addresses, which any framework's tensors can give.

Those of ``norm.c`` read arrays in channels-last layout, as torch's are; those of ``planes.c`` arrays in contiguous layout,
as Paddle's are. ``dropout.c`` is for both. ``convolution.c`` is for torch's.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mtrain.core.compiling import CannotCompileError, compile_library
from mtrain.core.interfaces import Array
from mtrain.core.network import noise

SOURCE = Path(__file__).with_name("norm.c")
PLANES = Path(__file__).with_name("planes.c")
DROPOUT = Path(__file__).with_name("dropout.c")
CONVOLUTION = Path(__file__).with_name("convolution.c")
_ADDRESS, _SIZE, _FLAG, _REAL = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_double
_SIGNATURES = {
    "statistics": (_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _FLAG),
    "output": (_ADDRESS, _SIZE, _SIZE, *[_ADDRESS] * 4, _FLAG, _ADDRESS, _FLAG),
    "gradient_sums": (_ADDRESS, _ADDRESS, *[_SIZE] * 3, *[_ADDRESS] * 4, _FLAG, _ADDRESS, _ADDRESS, _FLAG),
    "input_gradient": (_ADDRESS, _ADDRESS, *[_SIZE] * 3, *[_ADDRESS] * 5, _FLAG),
}
"""Types of the arguments; ``norm.c`` documents each function."""
_PLANES = {
    "forward": (_ADDRESS, *[_SIZE] * 3, _REAL, *[_ADDRESS] * 2, _FLAG, *[_ADDRESS] * 6, _REAL, _REAL, _FLAG),
    "backward": (*[_ADDRESS] * 2, *[_SIZE] * 3, *[_ADDRESS] * 2, _FLAG, *[_ADDRESS] * 5, _FLAG),
}
"""The same of ``planes.c``."""
_DROPOUT = {"apply": (*[_ADDRESS] * 2, *[_SIZE] * 4, _REAL, _ADDRESS, _FLAG)}
"""The same of ``dropout.c``."""
_CONVOLUTION = {"weight_gradient": (*[_ADDRESS] * 3, *[_SIZE] * 10)}
"""The same of ``convolution.c``."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of loading: the kernels, or the reason why there are none."""

    kernels: Any
    """A function for each signature, which raises MemoryError if there is no memory for its sums; None: there are none."""
    reason: str = ""


@cache
def load() -> Loaded:
    """Load the kernels into this process, after compiling them where that was not done before; a second at most."""
    return _load(SOURCE, "norm", _SIGNATURES, _check)


@cache
def load_planes() -> Loaded:
    """Do what ``load`` does for the kernels in contiguous layout."""
    return _load(PLANES, "planes", _PLANES, _check_planes)


@cache
def load_dropout() -> Loaded:
    """Do the same for the kernel of dropout. Its bits are those of the frameworks, so that not every rank must have it."""
    return _load(DROPOUT, "dropout", _DROPOUT, _check_dropout)


@cache
def load_convolution() -> Loaded:
    """Do the same for the gradient of a convolution's weight."""
    return _load(CONVOLUTION, "convolution", _CONVOLUTION, _check_convolution)


def _load(source: Path, family: str, signatures: Mapping[str, tuple[Any, ...]], check: Callable[[Any], None]) -> Loaded:
    try:
        library = ctypes.CDLL(str(compile_library(source)))
        names = {name: _function(library, f"mtrain_{family}_{name}", types) for name, types in signatures.items()}
        kernels = SimpleNamespace(**names)
        check(kernels)
    except (CannotCompileError, OSError, AttributeError) as error:
        return Loaded(None, str(error))
    return Loaded(kernels)


def _function(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Callable[..., None]:
    function = getattr(library, name)
    function.argtypes = types
    function.restype = ctypes.c_int

    def call(*arguments: float | None) -> None:
        if function(*arguments) != 0:
            raise MemoryError("no memory for the sums of a layer")

    return call


def _check(kernels: Any) -> None:
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
    _compare(y, x, moments, weight, bias)


def _check_planes(kernels: Any) -> None:
    """Do what ``_check`` does; the images are two, of the same pixels.

    Raises:
        CannotCompileError: The result is wrong.
    """
    pixels, channels = 250, 5
    x = np.sin(np.arange(2 * pixels * channels, dtype=np.float32)).reshape(2, channels, pixels) * 3 + 1
    moments, running, y = np.empty((3, channels)), np.zeros((2, channels), np.float32), np.empty_like(x)
    weight, bias = np.linspace(0.5, 1.5, channels, dtype=np.float32), np.linspace(-1, 1, channels, dtype=np.float32)
    addresses = [array.ctypes.data for array in (y, *moments, *running)]
    kernels.forward(
        x.ctypes.data, 2, channels, pixels, 1e-3, weight.ctypes.data, bias.ctypes.data, 1, *addresses, 1.0, 1.0, 1
    )  # fmt: skip
    rows = [np.moveaxis(array, 1, 2).reshape(-1, channels) for array in (y, x)]
    _compare(rows[0], rows[1], moments, weight, bias)


def _check_dropout(kernels: Any) -> None:
    """Do what ``_check`` does.

    Raises:
        CannotCompileError: The result is wrong.
    """
    keys, x = np.array([-5, 7], np.int32), np.ones((2, 100), np.float32)
    y, layer, least_kept = np.empty_like(x), noise.layer_code("a"), noise.threshold(0.3)
    kernels.apply(x.ctypes.data, keys.ctypes.data, 2, 100, layer, least_kept, 3.0, y.ctypes.data, 1)
    if not np.array_equal(y, noise.kept_elements(keys, "a", 100, 0.3) * 3.0):
        raise CannotCompileError("the compiled kernels give wrong results here")


def _check_convolution(kernels: Any) -> None:
    """Do what ``_check`` does; the sides of the kernel are 3, the stride is 2, the padding 1.

    Raises:
        CannotCompileError: The result is wrong.
    """
    x = np.sin(np.arange(2 * 7 * 5 * 3, dtype=np.float32)).reshape(2, 7, 5, 3)
    dy = np.cos(np.arange(2 * 4 * 3 * 18, dtype=np.float32)).reshape(2, 4, 3, 18)
    dw = np.empty((18, 3, 3, 3), np.float32)
    kernels.weight_gradient(x.ctypes.data, dy.ctypes.data, dw.ctypes.data, 2, 3, 7, 5, 18, 4, 3, 3, 2, 1)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2]
    if not np.allclose(dw, np.einsum("nhwcij,nhwo->oijc", windows, dy), rtol=1e-5, atol=1e-5):
        raise CannotCompileError("the compiled kernels give wrong results here")


def _compare(y: Array, x: Array, moments: Array, weight: Array, bias: Array) -> None:
    """Compare outputs and statistics with those of float64; ``x`` and ``y`` are (pixels, channels)."""
    exact = x.astype(np.float64)
    z = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + 1e-3) * weight + bias
    right = np.allclose(y, z / (1 + np.exp(-z)), rtol=1e-5, atol=1e-6)
    if not (right and np.allclose(moments[:2], (exact.mean(0), exact.var(0)), rtol=1e-5, atol=1e-6)):
        raise CannotCompileError("the compiled kernels give wrong results here")
