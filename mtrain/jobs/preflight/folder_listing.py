"""List a folder as names and sizes of its files, and as digests that let hosts compare it without sending all names.

Files are divided into ``BUCKETS`` buckets by a checksum of their name, and each bucket has a digest. Where digests of
two hosts differ, the names of one such bucket (some hundreds for a large folder) are sent to find the first file that
differs.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BUCKETS = 256
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

    def digests(self) -> list[str]:
        """Return the digest of each bucket."""
        totals = [hashlib.sha256() for _ in range(BUCKETS)]
        for name, size in self.files:
            totals[bucket_of(name)].update(f"{name}\0{'' if size is None else size}\n".encode(errors="surrogateescape"))
        return [total.hexdigest()[:16] for total in totals]

    def bucket(self, number: int) -> list[tuple[str, int | None]]:
        """Return the (name, size) of each file in one bucket; in names, bytes that are no UTF-8 are escaped, for JSON."""
        files = [
            (name.encode(errors="surrogateescape"), size) for name, size in self.files if bucket_of(name) == number
        ]
        return [(name.decode(errors="backslashreplace"), size) for name, size in files]


def bucket_of(name: str) -> int:
    """Return the bucket of a file's name."""
    return zlib.crc32(name.encode(errors="surrogateescape")) % BUCKETS


def first_difference(
    one: Sequence[tuple[str, int | None]], other: Sequence[tuple[str, int | None]]
) -> tuple[str, int | None, int | None] | None:
    """Return (name, size in ``one``, size in ``other``) of the first file that differs, or None.

    Size -1: it is missing.
    """
    sizes_in_one, sizes_in_other = dict(one), dict(other)
    for name in sorted(sizes_in_one.keys() | sizes_in_other.keys()):
        sizes = sizes_in_one.get(name, -1), sizes_in_other.get(name, -1)
        if sizes[0] != sizes[1]:
            return name, *sizes
    return None


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
