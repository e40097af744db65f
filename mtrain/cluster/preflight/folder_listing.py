"""A folder as names and sizes of its files, and as digests that are compared between hosts without sending the names.

Files lie in ``BUCKETS`` buckets by a checksum of their name; where two hosts differ, one bucket of each, some hundred names
of a large folder, tells the first file that does.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BUCKETS = 256
MOST_NAMES = 1_000_000
MOST_SIZES = 20_000
"""Sizes are looked at for every k-th file of a larger folder: asking for one may be a question to a file server."""
LIMIT_S = 2.5
"""Seconds after which a slow folder is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What lies in a folder."""

    files: tuple[tuple[str, int | None], ...]
    """(name relative to the folder, bytes; None: not looked at), by name."""
    complete: bool
    """False: it was too large or too slow to be listed."""

    @property
    def sized(self) -> int:
        """Files whose size was looked at."""
        return sum(size is not None for _, size in self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of these."""
        return sum(size or 0 for _, size in self.files)

    def digests(self) -> list[str]:
        """One of each bucket."""
        totals = [hashlib.sha256() for _ in range(BUCKETS)]
        for name, size in self.files:
            totals[bucket_of(name)].update(f"{name}\0{'' if size is None else size}\n".encode(errors="surrogateescape"))
        return [total.hexdigest()[:16] for total in totals]

    def bucket(self, number: int) -> list[tuple[str, int | None]]:
        """The files of one bucket, names as text that can be sent."""
        return [(_sendable(name), size) for name, size in self.files if bucket_of(name) == number]


def bucket_of(name: str) -> int:
    """The bucket in which a file of this name is looked for."""
    return zlib.crc32(name.encode(errors="surrogateescape")) % BUCKETS


def first_difference(
    one: Sequence[tuple[str, int | None]], other: Sequence[tuple[str, int | None]]
) -> tuple[str, int | None, int | None] | None:
    """(name, size in ``one``, size in ``other``) of the first file that differs; -1: it is not there."""
    left, right = dict(one), dict(other)
    for name in sorted(left.keys() | right.keys()):
        sizes = left.get(name, -1), right.get(name, -1)
        if sizes[0] != sizes[1]:
            return name, *sizes
    return None


def list_folder(
    root: Path, *, skip: Sequence[Path] = (), limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic
) -> Listing:
    """What lies below ``root``, links followed; hidden files, caches of labels and the folders ``skip`` are left out.

    Raises:
        OSError: ``root`` cannot be read.
    """
    deadline = clock() + limit_s
    found: list[os.DirEntry[str]] = []
    base = len(str(root).rstrip("/")) + 1
    skipped = {os.path.realpath(path) for path in skip}
    with os.scandir(root):
        pass
    for entry in _files(str(root), skipped):
        found.append(entry)
        if len(found) >= MOST_NAMES or (len(found) % 1000 == 0 and clock() > deadline):
            return Listing(files=(), complete=False)
    found.sort(key=lambda entry: entry.path)
    step = -(-len(found) // MOST_SIZES) or 1
    files: list[tuple[str, int | None]] = []
    for number, entry in enumerate(found):
        files.append((entry.path[base:], _size(entry) if number % step == 0 else None))
        if number % 100 == 0 and clock() > deadline:
            return Listing(files=(), complete=False)
    return Listing(files=tuple(files), complete=True)


def _files(folder: str, skipped: set[str]) -> Iterator["os.DirEntry[str]"]:
    """Files below ``folder``; a folder that was seen before, through whatever link, is not entered again."""
    todo, seen = [folder], set(skipped)
    while todo:
        real = os.path.realpath(current := todo.pop())
        if real in seen:
            continue
        seen.add(real)
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
        except OSError:  # below the root: what cannot be read is missing from the list, and differs
            pass
        todo += sorted(below, reverse=True)  # in one order everywhere: of two links to a folder the same one counts


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return -1


def _sendable(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
