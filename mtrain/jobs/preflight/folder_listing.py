"""List a folder as names and sizes of its files, and as a digest by which hosts compare it."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_NAMES = 1_000_000
"""A folder with this many files is not compared."""
MAX_SIZES = 20_000
"""Of a folder with more files, the size of every k-th one is read, because each size may cost a request to a file
server."""
LIMIT_S = 2.5
"""Seconds after which the listing of a slow folder is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Names and sizes of the files below a folder."""

    files: tuple[tuple[str, int | None], ...]
    """(name relative to the folder, size in bytes or None where it was not read), sorted by path."""
    complete: bool
    """False: the folder was too large or too slow to be listed, and ``files`` is empty."""

    @property
    def known_sizes(self) -> int:
        """Return how many files have a known size."""
        return sum(size is not None for _, size in self.files)

    @property
    def nbytes(self) -> int:
        """Return the sum of the known sizes, in bytes."""
        return sum(size or 0 for _, size in self.files)

    def digest(self) -> str:
        """Return the digest of all names and sizes."""
        total = hashlib.sha256()
        for name, size in self.files:
            total.update(f"{name}\0{'' if size is None else size}\n".encode(errors="surrogateescape"))
        return total.hexdigest()


def list_folder(
    root: Path, *, skip: Sequence[Path] = (), limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
) -> Listing:
    """List the files below ``root``, following links; hidden files, label caches and the folders ``skip`` are left out.

    Raises:
        OSError: ``root`` cannot be read.
    """
    deadline = clock() + limit_s
    entries: list[os.DirEntry[str]] = []
    base = len(str(root).rstrip("/")) + 1
    skipped = {os.path.realpath(path) for path in skip}
    with os.scandir(root):  # raises where the root cannot be read; `_files` passes over folders that cannot
        pass
    for entry in _files(str(root), skipped):
        entries.append(entry)
        if len(entries) >= MAX_NAMES or (len(entries) % 1000 == 0 and clock() > deadline):
            return Listing(files=(), complete=False)
    entries.sort(key=lambda entry: entry.path)
    step = -(-len(entries) // MAX_SIZES) or 1
    files: list[tuple[str, int | None]] = []
    for number, entry in enumerate(entries):
        files.append((entry.path[base:], _size(entry) if number % step == 0 else None))
        if number % 100 == 0 and clock() > deadline:
            return Listing(files=(), complete=False)
    return Listing(files=tuple(files), complete=True)


def _files(folder: str, skipped: set[str]) -> Iterator["os.DirEntry[str]"]:
    """Yield the files below ``folder``. A folder that several links lead to is entered once."""
    todo, visited = [folder], set(skipped)
    while todo:
        real = os.path.realpath(current := todo.pop())
        if real in visited:
            continue
        visited.add(real)
        below: list[str] = []
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name.endswith(".cache"):
                        continue
                    if entry.is_dir():
                        below.append(entry.path)
                    elif entry.is_file():
                        yield entry
        except (
            OSError
        ):  # A folder below the root that cannot be read lacks its files in the list, so the list will differ.
            pass
        todo += sorted(
            below, reverse=True
        )  # Sorted, so that every host enters a folder through the same one of two links.


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return -1
