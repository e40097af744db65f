"""Arrays as pickles describe them: checked against the bytes that are really there, then views of those bytes, never copies."""

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


MAX_GROWTH = 8
"""Bytes of arrays for each byte of their file. Half precision doubles, tied weights count twice; a pickle can name one buffer for ever."""
ALLOWANCE_BYTES = 2**20
"""What the arrays of a small file may take in any case."""
MIB = 2**20


class Leaf(Protocol):
    """Something that is an array, once it is asked for."""

    def size_bytes(self) -> int:
        """What the array takes once it is widened and no longer shares its bytes with others. Raises ``Refused``."""
        ...

    def array(self) -> Array:
        """The array, perhaps read-only. Raises ``Refused`` where what is described does not fit the bytes."""
        ...


def numeric(text: object) -> np.dtype[Any]:
    """The numpy type of a code such as ``f4``: real numbers and truth values only, never objects."""
    if not isinstance(text, str) or not _NUMERIC.fullmatch(text):
        raise Refused(f"the array type {str(text)[:40]!r}; expected numbers")
    return np.dtype(text)


def dimensions(value: object) -> tuple[int, ...]:
    """A shape or strides: whole numbers of at least 0, at most 32 of them."""
    if not isinstance(value, tuple | list) or len(value) > 32:
        raise Refused("a shape that is no list of up to 32 numbers")
    if not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise Refused("a shape with a size that is no whole number of at least 0")
    return tuple(value)


def check_growth(leaves: Iterable[Leaf], *, file_bytes: int) -> None:
    """Refuse arrays that would take far more memory than their file has bytes, before any of them is made.

    Raises:
        Refused: they would.
    """
    total = sum(leaf.size_bytes() for leaf in leaves)
    if total > MAX_GROWTH * file_bytes + ALLOWANCE_BYTES:
        raise Refused(
            f"its arrays would take {total / MIB:,.0f} MiB of memory, but the file has {file_bytes / MIB:,.1f} MiB; arrays "
            "of a file of weights do not share their bytes like that"
        )


def _widened_bytes(count: int, itemsize: int) -> int:
    """Two-byte numbers are counted as the float32 that they may become."""
    return count * (4 if itemsize == 2 else itemsize)


def widened(bits: Array) -> Array:
    """bfloat16 given as its 16 bits, exactly, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(slots=True, eq=False)
class PickledDtype:
    """numpy.dtype; its state brings the byte order."""

    dtype: np.dtype[Any]

    def build(self, state: object) -> None:
        """``(version, byte order, None, None, None, ...)``; the Nones would be fields of a record."""
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
            raise Refused("a numpy type with an unknown state")
        if any(part is not None for part in state[2:5]):
            raise Refused("a numpy record type; expected numbers")
        if state[1] != "|":
            self.dtype = self.dtype.newbyteorder(state[1])


@dataclass(slots=True, eq=False)
class PickledArray:
    """numpy.ndarray; its state brings shape, type and content."""

    content: Array | None = None

    def build(self, state: object) -> None:
        """``(version, shape, type, Fortran order, bytes)``; without version in very old files."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise Refused("a numpy array with an unknown state")
        given_shape, dtype, fortran, content = state[-4:]
        shape = dimensions(given_shape)
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
        """See ``Leaf``."""
        return _widened_bytes(self.array().size, self.array().itemsize)

    def array(self) -> Array:
        """See ``Leaf``."""
        if self.content is None:
            raise Refused("a numpy array without content")
        return self.content


@dataclass(slots=True, eq=False)
class TorchStorage:
    """A run of numbers that tensors are views of; read when first asked for."""

    code: str
    """numpy's code of the type, or ``bfloat16``."""
    length: int
    """In elements."""
    read: Callable[[], bytes]
    _numbers: Array | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the file."""
        return self._dtype.itemsize

    def numbers(self) -> Array:
        """All of them, (length,); read once, however many tensors are views of them."""
        if self._numbers is None:
            self._numbers = self._read()
        return self._numbers

    def _read(self) -> Array:
        content = self.read()
        if len(content) != self.length * self.itemsize:
            raise Refused(f"a storage of {self.length} elements with {len(content)} bytes")
        flat = np.frombuffer(content, self._dtype)
        return widened(flat) if self.code == BFLOAT16 else flat

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.code == BFLOAT16 else self.code)


@dataclass(slots=True, eq=False)
class TorchTensor:
    """A view of a storage."""

    storage: TorchStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Both in elements."""

    @classmethod
    def of(cls, storage: object, offset: object, shape: object, strides: object, *_: object) -> "TorchTensor":
        """From the arguments of ``torch._utils._rebuild_tensor_v2``; ``requires_grad`` and hooks are passed over."""
        if not isinstance(storage, TorchStorage) or type(offset) is not int or offset < 0:
            raise Refused("a tensor without storage or with an offset below 0")
        made = cls(storage, offset, dimensions(shape), dimensions(strides))
        if len(made.shape) != len(made.strides):
            raise Refused("a tensor with as many strides as it has not axes")
        count = math.prod(made.shape)
        last = offset + sum((n - 1) * step for n, step in zip(made.shape, made.strides, strict=True))
        if count > storage.length or (count and last >= storage.length):
            raise Refused(
                f"a tensor of shape {made.shape} that is larger than its storage of {storage.length} elements"
            )
        return made

    def size_bytes(self) -> int:
        """See ``Leaf``."""
        return _widened_bytes(math.prod(self.shape), self.storage.itemsize)

    def array(self) -> Array:
        """See ``Leaf``."""
        numbers = self.storage.numbers()
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, numbers.dtype)
        strides = [step * numbers.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides, writeable=False)
