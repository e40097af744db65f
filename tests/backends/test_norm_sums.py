"""The compiled BatchNorm called directly: whole numbers whose sums are exact in float64, in every framework's layout."""

from typing import Any

import numpy as np
import pytest

from mtrain.backends._kernels import library
from mtrain.core.interfaces import Array
from tests.backends.compiler import needs_a_compiler

pytestmark = [needs_a_compiler, pytest.mark.under_torch]
PIXELS, CHANNELS = 5_000, 3


def numbers() -> Array:
    """Whole numbers around 1,000, -3 and 0; their means need more than the 24 bits of float32."""
    rng = np.random.default_rng(0)
    return (rng.integers(-4, 5, (PIXELS, CHANNELS)) + np.array([1000, -3, 0])).astype(np.float32)


def kernels() -> Any:
    found = library.load().kernels
    assert found is not None, library.load().reason
    return found


def statistics(x: Array) -> tuple[Array, Array]:
    mean, variance = np.empty(CHANNELS), np.empty(CHANNELS)
    kernels().statistics(x.ctypes.data, *x.shape, mean.ctypes.data, variance.ctypes.data, 1)
    return mean, variance


def test_means_are_those_of_float64() -> None:
    x = numbers()
    mean, variance = statistics(x)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-6)


def test_sums_of_gradients_take_the_exact_mean() -> None:
    """A mean of 1,000 that is rounded to float32 is up to 3e-5 off, and each of the pixels adds that to the sum."""
    x = numbers()
    dy = np.full_like(x, 64.0)
    mean, variance = (np.ascontiguousarray(each) for each in statistics(x))
    inverse, ones, zeros = 1 / np.sqrt(variance), np.ones(CHANNELS, np.float32), np.zeros(CHANNELS, np.float32)
    sums, gradient = np.empty((2, CHANNELS)), np.empty_like(x)
    moments = (mean.ctypes.data, inverse.ctypes.data, ones.ctypes.data, zeros.ctypes.data)
    given = (x.ctypes.data, dy.ctypes.data, CHANNELS, *x.shape, *moments, 0, gradient.ctypes.data, sums.ctypes.data, 1)
    kernels().gradient_sums(*given)
    np.testing.assert_array_equal(sums[0], 64.0 * PIXELS)
    scale = np.abs(dy.astype(np.float64) * (x - mean) * inverse).sum(0)
    exact = (dy.astype(np.float64) * (x.astype(np.float64) - mean)).sum(0) * inverse
    assert np.abs(sums[1] - exact).max() < 1e-6 * scale.max()


def test_planes_have_the_means_of_float64_too() -> None:
    found = library.load_planes().kernels
    assert found is not None, library.load_planes().reason
    x = np.ascontiguousarray(numbers().T.reshape(1, CHANNELS, PIXELS))
    y, moments = np.empty_like(x), np.empty((3, CHANNELS))
    running = np.zeros((2, CHANNELS), np.float32)
    running[1] = 1.0
    ones, zeros = np.ones(CHANNELS, np.float32), np.zeros(CHANNELS, np.float32)
    addresses = [array.ctypes.data for array in (y, *moments, *running)]
    sizes, affine = (1, CHANNELS, PIXELS, 1e-3), (ones.ctypes.data, zeros.ctypes.data)
    found.forward(x.ctypes.data, *sizes, *affine, 0, *addresses, 0.25, PIXELS / (PIXELS - 1), 1)
    exact = x[0].astype(np.float64)
    mean, variance = exact.mean(1), exact.var(1)
    np.testing.assert_allclose(moments[0], mean, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(moments[1], variance, rtol=1e-6)
    np.testing.assert_allclose(running[0], 0.25 * mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(running[1], 0.75 + 0.25 * exact.var(1, ddof=1), rtol=1e-6)
    normal = (exact - mean[:, None]) / np.sqrt(variance + 1e-3)[:, None]
    np.testing.assert_allclose(y[0], normal, rtol=1e-5, atol=1e-6)
