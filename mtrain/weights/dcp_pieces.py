"""Put an array together from the pieces that ranks wrote of it, each a zip archive as of ``torch.save``."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError
from mtrain.spec.files import open_file
from mtrain.weights.arrays import BFLOAT16, TorchTensor, check_growth
from mtrain.weights.pickles import Refused
from mtrain.weights.torch_files import ZIP_START, read_zip

_TYPES = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    BFLOAT16: "float32",
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint8": "uint8",
    "bool": "bool",
}
"""Maps torch's name of a type to numpy's type of its values; bfloat16 is widened."""
_MAX_PIECES = 4096
"""Largest number of pieces of an array: ranks that share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPiece:
    """Where a part of an array lies, in a file and in the array."""

    file: Path
    start: int
    """First byte in the file."""
    length: int
    """Bytes in the file."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def place(self) -> tuple[slice, ...]:
        """The part of the array."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def read(self) -> Array:
        """Return the numbers.

        Raises:
            CheckpointError: The file is damaged here.
            Refused: It contains something else than a tensor of this shape.
        """
        with open_file(self.file) as file:
            file.seek(self.start)
            content = file.read(self.length)
        if not content.startswith(ZIP_START):
            raise CheckpointError(f"{self.file}: damaged: no tensor at byte {self.start}; copy it again")
        try:
            tensor = read_zip(content)
        except Refused as error:
            raise Refused(f"{self.file.name}, at byte {self.start}: {error}", name=error.name) from error
        if not isinstance(tensor, TorchTensor) or tensor.shape != self.sizes:
            raise Refused(f"{self.file.name}: at byte {self.start} no tensor of shape {self.sizes}")
        check_growth([tensor], file_bytes=len(content))
        array = tensor.array()
        # A view would keep all of its storage.
        return array if tensor.storage.length == array.size else array.copy()


@dataclass(kw_only=True, slots=True, eq=False)
class SplitTensor:
    """An array in pieces, which are read when it is asked for."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the type."""
    pieces: list[SavedPiece]

    def size_bytes(self) -> int:
        """Implement ``Leaf``."""
        self._check()
        return math.prod(self.shape) * max(np.dtype(_TYPES[self.dtype]).itemsize, 4 if self.dtype == "float16" else 1)

    def array(self) -> Array:
        """Implement ``Leaf``; one piece is in memory besides the array.

        Raises:
            CheckpointError: A file is damaged.
        """
        self._check()
        # Without a copy: one rank has written the whole array.
        if len(self.pieces) == 1:
            return self._check_piece(self.pieces[0].read())
        array = np.empty(self.shape, _TYPES[self.dtype])
        for piece in self.pieces:
            array[piece.place] = self._check_piece(piece.read())
        return array

    def _check_piece(self, part: Array) -> Array:
        if part.dtype != np.dtype(_TYPES[self.dtype]):
            raise Refused(f"{self.key[:80]}: a piece of {part.dtype}, described as {self.dtype}")
        return part

    def _check(self) -> None:
        """Refuse types that numpy lacks, and pieces that leave something out or lie on each other."""
        if self.dtype not in _TYPES:
            raise Refused(f"{self.key[:80]}: numbers of type {self.dtype}; expected one of {', '.join(_TYPES)}")
        if len(self.pieces) > _MAX_PIECES:
            raise Refused(f"{self.key[:80]}: {len(self.pieces)} pieces; at most {_MAX_PIECES}")
        count, axes = len(self.pieces), len(self.shape)
        if any(len(piece.offsets) != axes or len(piece.sizes) != axes for piece in self.pieces):
            raise Refused(f"{self.key[:80]}: a piece with other axes than the array")
        begins = np.array([piece.offsets for piece in self.pieces], np.int64).reshape(count, axes)
        ends = begins + np.array([piece.sizes for piece in self.pieces], np.int64).reshape(count, axes)
        is_inside = bool((ends <= np.array(self.shape, np.int64)).all())
        # Pieces inside of the array that do not overlap and have as many elements leave nothing out.
        is_whole = sum(math.prod(piece.sizes) for piece in self.pieces) == math.prod(self.shape)
        if not is_inside or not is_whole or _overlap(begins, ends):
            raise Refused(f"{self.key[:80]}: its pieces do not make up its shape {self.shape}")


def _overlap(begins_NA: Array, ends_NA: Array) -> bool:
    """Return whether two of N boxes with A axes have an element in common."""
    return any(
        bool(((begins_NA[:n] < ends_NA[n]) & (begins_NA[n] < ends_NA[:n])).all(axis=1).any())
        for n in range(1, len(begins_NA))
    )
