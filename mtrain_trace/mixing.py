"""Digests and sketches of arrays that add up over shards, with numpy; ``torch_mixing`` computes the same on a device.

A *digest* is the sum over all elements of ``bits * coefficient(name, index)`` modulo 2^64. Equal digests mean equal bits
(a chance of about 2^-60 apart), and the digests of the parts of an array, computed by the ranks that hold them, add up
to the digest of the whole: nothing is gathered to prove that two shardings hold the same bits.

A *sketch* is ``LENGTH`` sums, each of every ``LENGTH``-th element under random signs (the count sketch of Charikar, Chen and
Farach-Colton 2002). Sketches are linear: the squared length of the difference of two sketches estimates the squared
distance of the arrays.

Coefficients depend on the element's index in the *whole* array. They repeat every ``PERIOD`` elements, multiplied by an
odd number for each period and for the name, so that one vector of a few megabytes serves arrays of any size.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

PERIOD = 1 << 16
"""Elements after which the coefficients repeat, up to a factor."""
LENGTH = 16
"""Numbers in a sketch: distances are estimated with a relative deviation of about sqrt(2 / 16) / 2, 18 %. Divides PERIOD."""
MASK = (1 << 64) - 1


def mix64(number: int) -> int:
    """Return 64 well mixed bits of a number: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def _mixed(numbers: Any) -> Any:
    """Return ``mix64`` of an array of uint64, which wraps as the arithmetic of the processor does."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@functools.lru_cache(maxsize=1)
def coefficients() -> Any:
    """Return the odd coefficients of one period, as int64 of shape (PERIOD,)."""
    return (_mixed(np.arange(PERIOD, dtype=np.uint64)) | np.uint64(1)).view(np.int64)


@functools.lru_cache(maxsize=1)
def signs() -> Any:
    """Return the signs of one period, +-1 as float64 of shape (PERIOD,)."""
    bits = _mixed(np.arange(PERIOD, dtype=np.uint64) + np.uint64(1 << 40))
    return 1.0 - 2.0 * (bits >> np.uint64(63)).astype(np.float64)


def name_seed(name: str) -> int:
    """Return a number that stands for the name of an array, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=65536)
def period_factor(seed: int, period: int) -> int:
    """Return the odd factor of a period's coefficients, as a signed number of 64 bits."""
    factor = mix64(seed ^ mix64(period)) | 1
    return factor - (1 << 64) if factor >> 63 else factor


@functools.lru_cache(maxsize=65536)
def period_signs(seed: int, period: int) -> tuple[float, ...]:
    """Return the signs by which the sketch of a period is multiplied."""
    bits = mix64(seed ^ mix64(~period & MASK))
    return tuple(1.0 - 2.0 * (bits >> place & 1) for place in range(LENGTH))


def pieces(start: int, size: int) -> list[tuple[int, int, int, int]]:
    """Return (period, first coefficient, first element, elements) of the parts of an array that lies from ``start``."""
    found, done = [], 0
    while done < size:
        period, first = divmod(start + done, PERIOD)
        count = min(PERIOD - first, size - done)
        found.append((period, first, done, count))
        done += count
    return found


def bits_of(array: Any) -> Any:
    """Return the bits of each element as int64, flat; integers by value, so that their width does not count."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "f":
        flat = flat.view({2: np.int16, 4: np.int32, 8: np.int64}[flat.dtype.itemsize])
    return flat.astype(np.int64)


def digest(array: Any, name: str, *, start: int = 0) -> int:
    """Return the digest of an array, or of the part of it that begins at the flat index ``start``."""
    bits, seed, total = bits_of(array), name_seed(name), 0
    for period, first, begin, count in pieces(start, bits.size):
        with np.errstate(over="ignore"):
            part = int(np.sum(bits[begin : begin + count] * coefficients()[first : first + count], dtype=np.int64))
        total += part * period_factor(seed, period)
    return total & MASK


def sketch(array: Any, name: str, *, start: int = 0) -> Any:
    """Return the sketch of an array or of a part of it, float64 of shape (LENGTH,)."""
    flat = np.ascontiguousarray(array).reshape(-1).astype(np.float64)
    seed, total = name_seed(name), np.zeros(LENGTH)
    for period, first, begin, count in pieces(start, flat.size):
        before, after = first % LENGTH, -(first + count) % LENGTH
        signed = np.pad(flat[begin : begin + count] * signs()[first : first + count], (before, after))
        total += signed.reshape(-1, LENGTH).sum(axis=0) * np.array(period_signs(seed, period))
    return total


def distance(a: Any, b: Any) -> float:
    """Return the estimated Euclidean distance of two arrays from their sketches."""
    return float(np.sqrt(np.sum((np.asarray(a) - np.asarray(b)) ** 2)))


def size_of(a: Any) -> float:
    """Return the estimated Euclidean length of an array from its sketch."""
    return float(np.sqrt(np.sum(np.asarray(a) ** 2)))
