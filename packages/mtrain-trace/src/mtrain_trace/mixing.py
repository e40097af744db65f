"""Digests and sketches of arrays that add up over shards, with numpy; ``torch_mixing`` computes the same on a device.

A *digest* is the sum over all elements of ``bits * coefficient(name, index)`` modulo 2^64. Equal digests mean equal bits
(a chance of about 2^-60 apart), and the digests of the parts of an array, computed by the ranks that hold them, add up
to the digest of the whole: nothing is gathered to prove that two shardings hold the same bits.

A *sketch* is ``LENGTH`` sums, each of every ``LENGTH``-th element under random signs (the count sketch of Charikar, Chen and
Farach-Colton 2002). Sketches are linear: the squared length of the difference of two sketches estimates the squared
distance of the arrays.

Coefficients and signs depend on the element's index in the *whole* array. An array is taken as rows of ``ROW`` elements,
which share one short vector of coefficients; each row has an odd factor, and each row and sum a sign, by its number and the
array's name. So the rows of many arrays can be summed in one pass, and nothing as large as the model is kept for it. A
sample's elements have coefficients that repeat every ``PERIOD`` elements.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

PERIOD = 1 << 16
"""Elements of a sample after which the coefficients repeat, up to a factor. Arrays are read in parts of this size."""
ROW = 512
"""Elements of an array after which coefficients and signs repeat, up to a factor. Divides PERIOD."""
LENGTH = 16
"""Numbers in a sketch: distances are estimated with a relative deviation of about sqrt(2 / 16) / 2, 18 %. Divides ROW."""
MASK = (1 << 64) - 1


def mix64(number: int) -> int:
    """Return 64 well mixed bits of a number: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def _mix(numbers: Any) -> Any:
    """Return ``mix64`` of an array of uint64, which wraps as the arithmetic of the processor does."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@functools.lru_cache(maxsize=1)
def coefficients() -> Any:
    """Return the odd coefficients of one period, as int64 of shape (PERIOD,)."""
    return (_mix(np.arange(PERIOD, dtype=np.uint64)) | np.uint64(1)).view(np.int64)


@functools.lru_cache(maxsize=1)
def signs() -> Any:
    """Return the signs of a row, +-1 as float64 of shape (ROW,)."""
    # Every row has these signs. Of 4000 draws this one is the best for arrays of one constant, whose length it tells to 6 %.
    bits = _mix(np.arange(ROW, dtype=np.uint64) + np.uint64(2108 << 40))
    return 1.0 - 2.0 * (bits >> np.uint64(63)).astype(np.float64)


def name_seed(name: str) -> int:
    """Return a number that stands for the name of an array, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=65536)
def period_factor(seed: int, period: int) -> int:
    """Return the odd factor of a period's coefficients, as a signed number of 64 bits."""
    factor = mix64(seed ^ mix64(period)) | 1
    return factor - (1 << 64) if factor >> 63 else factor


def row_factors(seeds: Any, rows: Any) -> Any:
    """Return the odd factors of rows of arrays, int64; ``seeds`` and ``rows`` (numbers of rows) are arrays of uint64."""
    return (_mix(seeds ^ _mix(rows)) | np.uint64(1)).view(np.int64)


def row_signs(seeds: Any, rows: Any) -> Any:
    """Return the signs by which the sums of rows are multiplied, +-1 as int8 of shape (rows, LENGTH)."""
    bits = _mix(seeds ^ _mix(~rows))
    return (1 - 2 * (bits[:, None] >> np.arange(LENGTH, dtype=np.uint64) & np.uint64(1)).astype(np.int8)).astype(
        np.int8
    )


def pieces(start: int, size: int) -> list[tuple[int, int, int, int]]:
    """Return (period, first coefficient, first element, elements) of the parts of a sample that lies from ``start``."""
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
        flat = fold(flat) if flat.dtype.itemsize == 8 else flat
    return flat.astype(np.int64)


def fold(words: Any) -> Any:
    """Return words of 64 bits (numpy or torch, int64) with their upper bits in lower ones, too; a one-to-one map.

    The highest bit times an odd coefficient is 2^63 whatever the coefficient is, so two signs that are flipped would cancel out.
    """
    # Not by half: a word may be two numbers of 32 bits, whose signs both flip.
    return words ^ ((words >> 17) & ((1 << 47) - 1))


def _rows(array: Any, start: int) -> Iterator[tuple[Any, Any]]:
    """Yield (numbers, rows of ROW elements) of an array that lies from ``start``, filled up with zeros at both ends."""
    flat, lead = np.ascontiguousarray(array).reshape(-1), start % ROW
    for begin in range(-lead, flat.size, PERIOD):
        part, before = flat[max(begin, 0) : begin + PERIOD], max(-begin, 0)
        part = np.pad(part, (before, -(before + part.size) % ROW)).reshape(-1, ROW)
        first = (start + begin) // ROW
        yield np.arange(first, first + len(part), dtype=np.uint64), part


def digest(array: Any, name: str, *, start: int = 0) -> int:
    """Return the digest of an array, or of the part of it that begins at the flat index ``start``."""
    seed, total = np.uint64(name_seed(name)), 0
    with np.errstate(over="ignore"):
        for numbers, rows in _rows(array, start):
            sums = bits_of(rows).reshape(rows.shape) @ coefficients()[:ROW]
            total += int(np.sum(sums * row_factors(seed, numbers), dtype=np.int64))
    return total & MASK


def sketch(array: Any, name: str, *, start: int = 0) -> Any:
    """Return the sketch of an array or of a part of it, float64 of shape (LENGTH,)."""
    seed, total = np.uint64(name_seed(name)), np.zeros(LENGTH)
    for numbers, rows in _rows(array, start):
        sums = (rows.astype(np.float64) * signs()).reshape(-1, ROW // LENGTH, LENGTH).sum(axis=1)
        total += (sums * row_signs(seed, numbers)).sum(axis=0)
    return total


def as_hex(number: Any) -> str:
    """Return a digest as the lines of a trace hold it."""
    return f"{int(number) & MASK:016x}"


def digest_of_rows(arrays: Iterable[Sequence[Any]]) -> int:
    """Return the digest of all arrays together, whose rows are as in ``together``."""
    return sum(int(row[0], 16) for row in arrays) & MASK


def together(arrays: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Return digest, length and sketch of all arrays together, as the line of an update holds them.

    Args:
        arrays: [digest, squared length, sketch] of each.
    """
    held = list(arrays)
    return {
        "digest": as_hex(digest_of_rows(held)),
        "norm": math.sqrt(sum(row[1] for row in held)),
        "sketch": [float(f"{sum(row[2][place] for row in held):.7g}") for place in range(LENGTH)],
    }


def rows(array: Any, seed: int, *, is_real: bool | None = None) -> Any:
    """Return a digest of each row of an array, int64 of shape (rows,), as ``torch_mixing.rows`` computes it.

    Args:
        array: the samples.
        seed: of the name under which they are known.
        is_real: whether integers are the bits of floating point numbers, as of bfloat16, which numpy does not know.
    """
    flat = np.ascontiguousarray(array).reshape(len(array), -1)
    if (is_real or flat.dtype.kind == "f") and flat.shape[1] and flat.shape[1] * flat.itemsize % 8 == 0:
        bits = fold(flat.view(np.int64))
    else:
        bits = bits_of(flat).reshape(flat.shape)
    total = np.zeros(len(bits), dtype=np.int64)
    with np.errstate(over="ignore"):
        for period, first, begin, count in pieces(0, bits.shape[1]):
            part = (bits[:, begin : begin + count] * coefficients()[first : first + count]).sum(axis=1)
            total += part * np.int64(period_factor(seed, period))
    return total


def distance(a: Any, b: Any) -> float:
    """Return the estimated Euclidean distance of two arrays from their sketches."""
    return float(np.sqrt(np.sum((np.asarray(a) - np.asarray(b)) ** 2)))


def size_of(a: Any) -> float:
    """Return the estimated Euclidean length of an array from its sketch."""
    return float(np.sqrt(np.sum(np.asarray(a) ** 2)))
