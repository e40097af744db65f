"""Weights that a job reads and does not train: found in their folder, and told apart from others by a digest."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mtrain.core.checkpoint.arrays_file import read_header
from mtrain.errors import SpecError
from mtrain.spec.files import open_file

BASE = "base"
"""Key, in the details of a task, of the digest of the weights that are read and not trained."""
PATTERN = "*.safetensors"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an array lies in a file, and what its bytes mean."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in the folder of a model, by name, as transformers chooses them.

    Some folders hold the weights once more under another name, for another program.
    """
    return sorted(folder.glob("model" + PATTERN)) or sorted(folder.glob(PATTERN))


def arrays_of(folder: Path) -> dict[str, _Place]:
    """Return where each array of a folder's safetensors lies; headers alone are read.

    Raises:
        SpecError: A file cannot be read, or ends before its arrays do.
    """
    places: dict[str, _Place] = {}
    for file in weight_files(folder):
        try:
            found = _places(file)
            size = file.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise SpecError(
                f"model.options.path: {file} cannot be read as safetensors: {error}; copy it again (git clones pointers where "
                "Git LFS is missing), or set from_scratch: true to start from random weights"
            ) from error
        if any(place.end > size for place in found.values()):
            raise SpecError(
                f"model.options.path: {file} ends too early: {size} bytes are fewer than its arrays take; copy it again"
            )
        places.update(found)
    return places


def digest_of(folder: Path) -> str:
    """Return the hexadecimal SHA-256 of the names, types, shapes and bytes of all arrays in a folder's safetensors.

    It is the same however the arrays are divided among files. A chunk is in memory at a time.

    Raises:
        SpecError: There are no such files, or one cannot be read.
    """
    places = arrays_of(folder)
    if not places:
        raise SpecError(
            f"model.options.path: {folder} has no weights ({PATTERN}); give the folder of a model with them"
        )
    total = hashlib.sha256()
    for name in sorted(places):
        place = places[name]
        # With names and shapes, so that the same bytes in another order are another base.
        total.update(f"{name}\0{place.kind}\0{place.shape}\0".encode())
        with open_file(place.file) as content:
            content.seek(place.start)
            for chunk in _chunks(content, place.end - place.start):
                total.update(chunk)
    return total.hexdigest()


def _places(file: Path) -> dict[str, _Place]:
    """Return the place of each array in a safetensors file."""
    with open_file(file) as content:
        entries, begin = read_header(content)
    entries.pop("__metadata__", None)
    places = {}
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        # A header may hold any JSON; a negative offset would read before the arrays.
        if not all(type(number) is int and number >= 0 for number in (start, end - start, *shape)):
            raise ValueError(f"{name[:80]}: no place in the file")
        places[name] = _Place(file=file, kind=str(entry["dtype"]), shape=shape, start=begin + start, end=begin + end)
    return places


def _chunks(content: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0:
        chunk = content.read(min(size, _CHUNK_BYTES))
        if not chunk:
            raise SpecError("model.options.path: a file of weights ends too early; copy it again")
        size -= len(chunk)
        yield chunk
