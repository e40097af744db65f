"""The order of very many samples as a function of the position, so that no rank holds a list of all samples."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_ROUNDS = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)
"""An odd number without pattern (2^64 divided by the golden ratio); multiplying by it is invertible and mixes upwards."""
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Permutation:
    """A permutation of ``range(length)`` that computes the numbers at the positions that are asked for.

    It is a Feistel network (Luby and Rackoff 1988) on the numbers below the next power of two: each round changes one half
    of the bits by a keyed function of the other half, which can be undone whatever the function is. A result that is no
    sample's number goes through the network again until it is one ("cycle walking", Black and Rogaway 2002).
    """

    length: int
    keys: tuple[int, ...]
    """One per round, 64 bits each."""

    @classmethod
    def of(cls, length: int, *, seed: int, epoch: int) -> "Permutation":
        """Return the permutation of an epoch."""
        keys = np.random.Generator(np.random.PCG64([seed, epoch])).integers(0, 2**64, _ROUNDS, dtype=np.uint64)
        return cls(length, tuple(int(key) for key in keys))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: slice) -> Indices:
        """Return the numbers (int64) at a slice of positions."""
        numbers = np.arange(*positions.indices(self.length), dtype=np.uint64)
        outside = np.ones(len(numbers), dtype=bool)
        while outside.any():
            numbers[outside] = self._mix(numbers[outside])
            outside = numbers >= np.uint64(self.length)
        return numbers.astype(np.int64)

    def tobytes(self) -> bytes:
        """Return bytes that are equal for equal permutations, as an array's are."""
        return np.array([self.length, *self.keys], dtype=np.uint64).tobytes()

    def _mix(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return where the network sends numbers below the next power of two."""
        bits = max((self.length - 1).bit_length(), 2)
        low_bits = bits // 2
        low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
        low, high = numbers & low_mask, numbers >> np.uint64(low_bits)
        for number, key in enumerate(self.keys):
            if number % 2:
                low ^= _key(high, key) & low_mask
            else:
                high ^= _key(low, key) & high_mask
        return high << np.uint64(low_bits) | low


def _key(numbers: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """Return well mixed numbers of 64 bits, another function for each key."""
    mixed = (numbers ^ np.uint64(key)) * _ODD
    mixed = (mixed ^ mixed >> _HALF) * _ODD
    return mixed ^ mixed >> _HALF
