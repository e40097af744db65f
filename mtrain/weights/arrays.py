"""Turn descriptions of arrays in pickles into numpy views, after checking them against the bytes of the file."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.weights.pickles import Refused

_NUMERIC = re.compile(r"[<>|=]?(f[248]|[iu][1248]|b1)")
BFLOAT16 = "bfloat16"


# An honest ratio can exceed 1, since half precision is widened and tied
# weights count twice. A hostile pickle can name one buffer without end.
MAX_GROWTH = 8
"""Largest ratio of the bytes of all arrays to the bytes of their file."""
ALLOWANCE_BYTES = 2**20
"""Bytes that the arrays of a file may take in addition, so that small files pass."""
MIB = 2**20


class Leaf(Protocol):
    """A description from which an array can be made."""

    def size_bytes(self) -> int:
        """Return the size of the array when it is widened and shares no bytes with others.

        Raises:
            Refused: The description is damaged.
        """
        ...

    def array(self) -> Array:
        """Return the array, perhaps read-only.

        Raises:
            Refused: The description does not fit the bytes.
        """
        ...


def numeric(text: object) -> np.dtype[Any]:
    """Return the numpy type of a code such as ``f4``; only real numbers and booleans are accepted, never objects."""
    if not isinstance(text, str) or not _NUMERIC.fullmatch(text):
        raise Refused(f"the array type {str(text)[:40]!r}; expected numbers")
    return np.dtype(text)


def dimensions(value: object) -> tuple[int, ...]:
    """Check a shape or strides, which are at most 32 integers of at least 0, and return them as a tuple."""
    if not isinstance(value, tuple | list) or len(value) > 32:
        raise Refused("a shape that is no list of up to 32 numbers")
    if not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise Refused("a shape with a size that is no whole number of at least 0")
    return tuple(value)


def check_growth(leaves: Iterable[Leaf], *, file_bytes: int) -> None:
    """Refuse arrays that would take far more memory than their file has bytes, before any of them is made.

    Raises:
        Refused: The arrays exceed ``MAX_GROWTH`` and ``ALLOWANCE_BYTES``.
    """
    total = sum(leaf.size_bytes() for leaf in leaves)
    if total > MAX_GROWTH * file_bytes + ALLOWANCE_BYTES:
        raise Refused(
            f"its arrays would take {total / MIB:,.0f} MiB of memory, but the file has {file_bytes / MIB:,.1f} MiB; arrays "
            "of a file of weights do not share their bytes like that"
        )


def _widened_bytes(count: int, itemsize: int) -> int:
    """Return the bytes of ``count`` numbers; two-byte numbers count as the float32 that they may become."""
    return count * (4 if itemsize == 2 else itemsize)


def widen(bits: Array) -> Array:
    """Convert bfloat16 numbers, stored as 16-bit integers, to float32 without rounding."""
    # bfloat16 is the upper half of a float32, so the lower half is 0.
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(slots=True, eq=False)
class PickledDtype:
    """A pickled ``numpy.dtype``, whose state carries the byte order."""

    dtype: np.dtype[Any]

    def build(self, state: object) -> None:
        """Apply a state ``(version, byte order, None, None, None, ...)``; other values than None mean a record type."""
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
            raise Refused("a numpy type with an unknown state")
        if any(part is not None for part in state[2:5]):
            raise Refused("a numpy record type; expected numbers")
        if state[1] != "|":
            self.dtype = self.dtype.newbyteorder(state[1])


@dataclass(slots=True, eq=False)
class PickledArray:
    """A pickled ``numpy.ndarray``, whose state carries shape, type and content."""

    content: Array | None = None

    def build(self, state: object) -> None:
        """Apply a state ``(version, shape, type, Fortran order, bytes)``; very old files have no version."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise Refused("a numpy array with an unknown state")
        raw_shape, dtype, fortran, content = state[-4:]
        shape = dimensions(raw_shape)
        if not isinstance(dtype, PickledDtype):
            raise Refused("a numpy array without a type")
        if not isinstance(content, bytes | bytearray):
            raise Refused(
                f"a numpy array whose content is of type {type(content).__name__}; expected the bytes of numbers"
            )
        if math.prod(shape) * dtype.dtype.itemsize != len(content):
            raise Refused(f"a numpy array of shape {shape} with {len(content)} bytes")
        flat = np.frombuffer(content, dtype.dtype)
        self.content = flat.reshape(shape, order="F" if fortran is True else "C")

    def size_bytes(self) -> int:
        """Implement ``Leaf``."""
        return _widened_bytes(self.array().size, self.array().itemsize)

    def array(self) -> Array:
        """Implement ``Leaf``."""
        if self.content is None:
            raise Refused("a numpy array without content")
        return self.content


@dataclass(slots=True, eq=False)
class TorchStorage:
    """A sequence of numbers that tensors are views of; it is read at the first use."""

    code: str
    """numpy's code of the type, or ``bfloat16``."""
    length: int
    """Number of elements."""
    read: Callable[[], bytes]
    """Reads the bytes from the file."""
    _numbers: Array | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the file."""
        return self._dtype.itemsize

    def numbers(self) -> Array:
        """Return all numbers, (length,); they are read once for all tensors that are views of them."""
        if self._numbers is None:
            self._numbers = self._read()
        return self._numbers

    def _read(self) -> Array:
        content = self.read()
        if len(content) != self.length * self.itemsize:
            raise Refused(f"a storage of {self.length} elements with {len(content)} bytes")
        flat = np.frombuffer(content, self._dtype)
        return widen(flat) if self.code == BFLOAT16 else flat

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.code == BFLOAT16 else self.code)


@dataclass(slots=True, eq=False)
class TorchTensor:
    """A pickled tensor, which is a view of a storage."""

    storage: TorchStorage
    offset: int
    """Offset into the storage, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""

    @classmethod
    def of(cls, storage: object, offset: object, shape: object, strides: object, *_: object) -> "TorchTensor":
        """Make a tensor from arguments of ``torch._utils._rebuild_tensor_v2``, ignoring ``requires_grad`` and hooks."""
        if not isinstance(storage, TorchStorage) or type(offset) is not int or offset < 0:
            raise Refused("a tensor without storage or with an offset below 0")
        tensor = cls(storage, offset, dimensions(shape), dimensions(strides))
        if len(tensor.shape) != len(tensor.strides):
            raise Refused("a tensor with as many strides as it has not axes")
        last = offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
        # ``as_strided`` checks nothing: a view beyond the storage would read the memory of the process.
        if math.prod(tensor.shape) and last >= storage.length:
            raise tensor._too_large()
        return tensor

    def _too_large(self) -> Refused:
        return Refused(
            f"a tensor of shape {self.shape} that is larger than its storage of {self.storage.length} elements"
        )

    def size_bytes(self) -> int:
        """Implement ``Leaf``."""
        # Only tensors that are weights come here. Others may repeat numbers of their
        # storage, as the grids do that YOLOv5's last layer keeps after an evaluation.
        if math.prod(self.shape) > self.storage.length:
            raise self._too_large()
        return _widened_bytes(math.prod(self.shape), self.storage.itemsize)

    def array(self) -> Array:
        """Implement ``Leaf``."""
        numbers = self.storage.numbers()
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, numbers.dtype)
        strides = [step * numbers.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides, writeable=False)
