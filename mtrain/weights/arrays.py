"""Arrays as pickles describe them: checked against the bytes that are really there, then views of those bytes, never copies."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.weights.pickles import Refused

_NUMERIC = re.compile(r"[<>|=]?(f[248]|[iu][1248]|b1)")
BFLOAT16 = "bfloat16"


class Leaf(Protocol):
    """Something that is an array, once it is asked for."""

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

    def numbers(self) -> Array:
        """All of them, (length,); read once, however many tensors are views of them."""
        if self._numbers is None:
            self._numbers = self._read()
        return self._numbers

    def _read(self) -> Array:
        content = self.read()
        dtype = np.dtype("<u2" if self.code == BFLOAT16 else self.code)
        if len(content) != self.length * dtype.itemsize:
            raise Refused(f"a storage of {self.length} elements with {len(content)} bytes")
        flat = np.frombuffer(content, dtype)
        return widened(flat) if self.code == BFLOAT16 else flat


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

    def array(self) -> Array:
        """See ``Leaf``."""
        numbers = self.storage.numbers()
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape, numbers.dtype)
        strides = [step * numbers.itemsize for step in self.strides]
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides, writeable=False)
