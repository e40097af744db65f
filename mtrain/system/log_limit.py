"""Keep the logs of a running job below a size: a piece of the middle of a file goes, its beginning and its end stay.

Ranks, and any library in them, write straight into their log: nothing stands in between, so the last line of a process that is
killed is in the file. The process that watches them takes a range out of the file by one call of the kernel, ``fallocate``, under
the lock that each write takes too, so no byte is lost that is not in this range:

* ext4 and XFS take the range out, and the file becomes shorter. That is for files that are open with ``O_APPEND``, whose writers go
  on at the new end.
* Btrfs, tmpfs and NFS 4.2 give the range's blocks back. The file keeps its length and has a hole, which reads as zeros.
* Other file systems can do neither, so the file grows, and a line in it says so.
"""

import ctypes
import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mtrain.spec import outputs
from mtrain.spec.files import open_file

LOOK_S = 1.0
"""Seconds between two looks at the sizes of the logs."""
BLOCK_BYTES = 64 << 10
"""A range begins and ends at a multiple of this, which is one of the block size of every usual file system."""
PIECE_BYTES = 256 << 10
"""Largest piece of a log that is passed on at once."""
MOST_LEFT_BYTES = 8 << 20
"""Most that is passed on of what a log has gained when its rank has ended."""
MARK_BYTES = 160
"""Length of the line that replaces the range, at the end of the file's beginning."""
MARK = re.compile(rb"\n\[mtrain: (\d+) bytes were left out here")
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE = 0x01, 0x02, 0x08
"""Modes of fallocate(2)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A range of bytes that was taken out of a log."""

    start: int
    stop: int
    is_shorter: bool
    """Whether what came after the range has moved to where it began; else there is a hole."""

    def offset_after(self, offset: int) -> int:
        """Return where the byte that was at ``offset`` is now, or the next one that is left."""
        if not self.is_shorter or offset <= self.start:
            return offset
        return max(self.start, offset - (self.stop - self.start))


class LimitedLogs:
    """The logs of the ranks of this host, and of what has started them."""

    def __init__(
        self,
        logs: Sequence[Path],
        *,
        limit_bytes: int | None,
        foreign: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``logs``: files that are open with O_APPEND. ``foreign``: a folder of files that others have opened as they like."""
        self._logs = logs
        self._foreign = foreign
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._looked_at = float("-inf")
        self._growing: set[Path] = set()
        """Files that have been told to grow, because their file system can take nothing out of them."""

    def look(self, *, now: bool = False) -> dict[str, Cut]:
        """Shorten the logs that have become too long; return the cuts by file name. More often than each second, do nothing.

        ``now``: look in any case.
        """
        if self._limit_bytes is None or (not now and self._clock() - self._looked_at < LOOK_S):
            return {}
        self._looked_at = self._clock()
        cuts = {path.name: self._shorten(path, self._limit_bytes, appends=True) for path in self._logs}
        for path in self._foreign_files():
            self._shorten(path, self._limit_bytes, appends=False)
        return {name: cut for name, cut in cuts.items() if cut is not None}

    def _foreign_files(self) -> list[Path]:
        if self._foreign is None:
            return []
        try:
            return [Path(entry.path) for entry in os.scandir(self._foreign) if entry.is_file(follow_symlinks=False)]
        except OSError:
            return []

    def _shorten(self, path: Path, limit_bytes: int, *, appends: bool) -> Cut | None:
        try:
            if path.stat().st_size <= limit_bytes:
                return None
            return shorten(path, limit_bytes=limit_bytes, appends=appends)
        except OSError as error:  # A log is no reason to end a job.
            if error.errno == errno.EOPNOTSUPP and path not in self._growing:
                self._growing.add(path)
                _tell_growing(path, limit_bytes)
            return None


def shorten(path: Path, *, limit_bytes: int, appends: bool) -> Cut | None:
    """Take a range out of a file that holds more than ``limit_bytes``: a quarter of them stays before it, and a quarter after it.

    ``appends``: all that write to it have opened it with O_APPEND. Return None where it is short enough, or somebody else is at it.

    Raises:
        OSError: the file is missing or no regular file, or its file system cannot do it.
    """
    with _hold(path) as descriptor:
        if descriptor is None:
            return None
        start, size = limit_bytes // 4, os.fstat(descriptor).st_size
        stop = (size - limit_bytes // 4) // BLOCK_BYTES * BLOCK_BYTES
        known = _mark_of(descriptor, start)
        left = _data_after(descriptor, start) if size > limit_bytes else start
        if start + size - left <= limit_bytes:
            return None
        cut = Cut(
            start, stop, is_shorter=appends and left == start and _change(descriptor, COLLAPSE_RANGE, start, stop)
        )
        if not cut.is_shorter and not _change(descriptor, PUNCH_HOLE | KEEP_SIZE, start, stop):
            raise OSError(errno.EOPNOTSUPP, "its file system cannot take a range out of a file", str(path))
        gone = (known if cut.is_shorter else 0) + stop - start
        os.pwrite(descriptor, _mark(gone, limit_bytes), start - MARK_BYTES)
        return cut


@contextmanager
def _hold(path: Path) -> Iterator[int | None]:
    """Give a descriptor of the file, locked against others who would shorten it; None where one does."""
    with outputs.open_to_write(path, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        except OSError:  # The file system has no locks.
            pass
        yield file.fileno()


def _data_after(descriptor: int, offset: int) -> int:
    """Return where the first byte at or after ``offset`` is that is in no hole."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:
        return offset


def _change(descriptor: int, mode: int, start: int, stop: int) -> bool:
    """Change the range of a file by fallocate(2); return whether its file system can."""
    library = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if fallocate is None:
        return False
    return bool(fallocate(descriptor, mode, ctypes.c_int64(start), ctypes.c_int64(stop - start)) == 0)


def _mark(gone_bytes: int, limit_bytes: int) -> bytes:
    """Return the line that says what is missing, always as long."""
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"\n[mtrain: {gone_bytes} bytes were left out here, the last of them at {at}; report.log_mb: {limit_bytes >> 20}]"
    return text.encode().ljust(MARK_BYTES - 1)[: MARK_BYTES - 1] + b"\n"


def _mark_of(descriptor: int, start: int) -> int:
    """Return how many bytes were left out before, as the line before ``start`` says."""
    found = MARK.match(os.pread(descriptor, MARK_BYTES, start - MARK_BYTES))
    return int(found[1]) if found else 0


def _tell_growing(path: Path, limit_bytes: int) -> None:
    with suppress(OSError), outputs.open_to_write(path, "ab") as file:
        file.write(
            f"[mtrain: this file system cannot take a piece out of a file, so this one grows beyond {limit_bytes} bytes "
            "(report.log_mb); put the logs elsewhere with cluster.log_dir]\n".encode()
        )


class Output:
    """What a log gains from now on, read in pieces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._is_open = False
        """Whether the last line has no end yet."""

    def read(self, *, at_end: bool = False) -> list[bytes]:
        """Return the next piece, if there is one; ``at_end``: all that are left, with the end of the last line.

        Of very much that is left, as when a rank prints faster than it is read, only the newest part is returned.
        """
        pieces: list[bytes] = []
        try:
            with open_file(self._path) as file:
                self._offset = _data_after(file.fileno(), self._offset)
                left = file.seek(0, os.SEEK_END) - self._offset
                if at_end and left > MOST_LEFT_BYTES:
                    pieces.append(left_out(left - MOST_LEFT_BYTES, where=self._path))
                    self._offset += left - MOST_LEFT_BYTES
                file.seek(self._offset)
                while piece := file.read(PIECE_BYTES):
                    self._offset += len(piece)
                    pieces.append(piece.replace(b"\0", b""))  # a hole reads as zeros
                    if not at_end:
                        break
        except OSError:
            pass
        if pieces:
            self._is_open = not pieces[-1].endswith(b"\n")
        return [*pieces, b"\n"] if at_end and self._is_open else pieces

    def skip(self, name: str, cut: Cut) -> None:
        """Go on after a range that was taken out of the log of that name."""
        if name == self._path.name:
            self._offset = cut.offset_after(self._offset)


def left_out(count: int, *, where: object) -> bytes:
    """Return the line that stands for ``count`` bytes that were not shown."""
    return f"\n[mtrain: {count} bytes are not shown here, see {where}]\n".encode()


def end_of(path: Path, *, start: int, limit_bytes: int) -> str:
    """Return the last ``limit_bytes`` bytes of a log after its byte ``start``, as text; empty where it cannot be read."""
    try:
        with open_file(path) as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - limit_bytes))
            return file.read(limit_bytes).decode(errors="replace").replace("\0", "")
    except OSError:
        return ""
