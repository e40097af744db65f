"""Files of arrays (safetensors) that are written array by array, and mapped into memory array by array.

Layout: 8 bytes with the length of the header, the header as JSON padded with spaces to a multiple of 8 bytes, then the
values of all arrays without gaps. Larger elements come first and arrays of one type are ordered by name, as the
safetensors library orders them; a file has the same bytes as one that the library writes.
"""

import json
import mmap
import os
import stat
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from mtrain.core.interfaces import Array, Outline
from mtrain.core.overriding import override
from mtrain.spec.files import parse_json

TYPES: Mapping[str, str] = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Types of the format and of numpy, in the order in which a file has its arrays."""
_CODES = {np.dtype(name): code for code, name in TYPES.items()}
_PLACES = {code: place for place, code in enumerate(TYPES)}
MAX_HEADER_BYTES = 32 << 20
"""Largest header that is read: it may take twenty times its size, and 200,000 arrays need less. The format allows 100 MB."""


# ------------------------------------------------------------------------------------------------------------- writing
def file_order(outlines: Mapping[str, Outline]) -> list[str]:
    """Return the names of arrays in the order of a file."""
    return sorted(outlines, key=lambda name: (_PLACES[_code(name, outlines[name])], name.encode()))


def starts(outlines: Mapping[str, Outline]) -> dict[str, int]:
    """Return where the values of each array begin after the header, in bytes; in the order of a file."""
    places, end = {}, 0
    for name in file_order(outlines):
        places[name] = end
        end += size_bytes(outlines[name])
    return places


def header(outlines: Mapping[str, Outline]) -> bytes:
    """Return the start of the file of arrays. Names get the prefix "/", because the format reserves ``__metadata__``."""
    entries = {}
    for name, start in starts(outlines).items():
        outline, code = outlines[name], _code(name, outlines[name])
        offsets = [start, start + size_bytes(outline)]
        entries["/" + name] = {"dtype": code, "shape": list(outline.shape), "data_offsets": offsets}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def size_bytes(outline: Outline) -> int:
    """Return the size of an array in bytes."""
    return int(np.prod(outline.shape, dtype=np.int64)) * outline.dtype.itemsize


def _code(name: str, outline: Outline) -> str:
    code = _CODES.get(outline.dtype.newbyteorder("="))
    if code is None:
        raise TypeError(f"{name}: arrays of type {outline.dtype} cannot be saved; expected one of {', '.join(TYPES)}")
    return code


def contents(arrays: Iterable[Array | None], outlines: Iterable[Outline]) -> Iterator[memoryview]:
    """Yield the bytes of each array, without copying it; ``outlines``: what was written in the header."""
    for array, outline in zip(arrays, outlines, strict=True):
        assert array is not None, "the writing rank has every array"
        assert (array.shape, array.dtype) == (outline.shape, outline.dtype), f"{array.shape} {array.dtype}: {outline}"
        little = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        yield little.reshape(-1).view(np.uint8).data


# ------------------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True, slots=True)
class _Place:
    """Where an array lies in its file."""

    outline: Outline
    start: int


class MappedArrays(Mapping[str, Array]):
    """The arrays of a file, each mapped into memory when it is accessed, and unmapped when it is dropped.

    Only what is read of an array takes memory, and only as long as the array is held. The arrays cannot be written to. The
    file may be deleted meanwhile, but must not be changed.
    """

    sha256: str | None = None
    """Digest of the file's content, if all ranks know that their files have the same."""

    def __init__(self, path: Path) -> None:
        """Read the header of a file.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is none of this format.
        """
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name}: is no regular file")
        try:
            self._places = _places(self._file)
            with safe_open(path, framework="numpy"):
                pass  # the library checks that the arrays fill the file without gaps
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path.name}: {error}") from error

    @property
    def outlines(self) -> dict[str, Outline]:
        """Shapes and types of the arrays."""
        return {name: place.outline for name, place in self._places.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays."""
        return {name: place.outline.shape for name, place in self._places.items()}

    @override
    def __getitem__(self, name: str) -> Array:
        place = self._places[name]
        size, outline = size_bytes(place.outline), place.outline
        if size == 0:
            return np.empty(outline.shape, outline.dtype)
        first = place.start - place.start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._file, place.start + size - first, access=mmap.ACCESS_READ, offset=first)
        values = np.frombuffer(mapped, np.uint8, count=size, offset=place.start - first)
        return values.view(outline.dtype).reshape(outline.shape)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    @override
    def __len__(self) -> int:
        return len(self._places)


def read_header(content: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the entries that describe the arrays of a file, and where their values begin.

    Raises:
        ValueError: It has no such header, or a longer one than is read.
    """
    length = int.from_bytes(content.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
    entries = parse_json(content.read(length))
    if not isinstance(entries, dict):
        raise ValueError("a header without names")
    return entries, 8 + length


def _places(file: int) -> dict[str, _Place]:
    with os.fdopen(os.dup(file), "rb") as content:
        content.seek(0)
        entries, begin = read_header(content)
    entries.pop("__metadata__", None)
    try:
        return {
            name.removeprefix("/"): _Place(
                Outline(tuple(entry["shape"]), np.dtype(TYPES[entry["dtype"]]).newbyteorder("<")),
                begin + int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
        }
    except (TypeError, KeyError, IndexError, OverflowError, AttributeError) as error:
        raise ValueError(f"a header of another form ({error!r:.80})") from error
