"""Find runs below a folder and read their files. Names come from a browser, contents from anybody.

Nothing outside the folder is read, also not through a link, and no file without a bound on its size.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mtrain.core.record_files import METRICS
from mtrain.errors import UsageError
from mtrain.spec.files import open_file, parse_json, read_bytes

MAX_JSON_BYTES = 8 << 20
MAX_DEPTH = 3
"""Levels of folders below the folder of runs that may hold runs."""
MAX_RUNS = 100_000
MAX_NAME = 1000
_SIGNS = (METRICS, "spec.json", "spec.yml")
"""Files by which a run folder is recognised."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Absent(Exception):
    """There is no such run, or no such file in it."""


class RunFiles:
    """The files of one run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._real = path.resolve()

    def file(self, name: str) -> Path:
        """Return the path of a regular file of the run.

        Raises:
            Absent: there is none, or it is a link that leaves the folder.
        """
        try:
            # A run folder of a stranger may hold a link to any file of this machine.
            real = (self.path / name).resolve(strict=True)
            regular = stat.S_ISREG(real.stat().st_mode)
        except (OSError, ValueError, RuntimeError) as error:
            raise Absent(name) from error
        if not regular or not real.is_relative_to(self._real):
            raise Absent(name)
        return real

    def json(self, name: str) -> dict[str, Any]:
        """Return the object that a JSON file holds; empty where it is missing, broken, too large or something else."""
        try:
            value = parse_json(read_bytes(self.file(name), limit=MAX_JSON_BYTES))
        except (Absent, OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def text(self, name: str, *, limit: int) -> str:
        """Return the beginning of a text file, at most ``limit`` bytes; empty where it is missing."""
        try:
            with open_file(self.file(name)) as file:
                return readable(file.read(limit))
        except (Absent, OSError):
            return ""

    def tail(self, name: str, *, limit: int) -> tuple[str, int]:
        """Return the last lines of a text file, at most ``limit`` bytes, and how many bytes come before them.

        Raises:
            Absent: there is no such file.
        """
        try:
            with open_file(self.file(name)) as file:
                start = max(0, file.seek(0, os.SEEK_END) - limit)
                file.seek(start)
                content = file.read(limit)
        except OSError as error:
            raise Absent(name) from error
        # The first line is cut unless the file begins there.
        first = content.find(b"\n") + 1 if start else 0
        return readable(content[first:]), start + first

    def logs(self) -> list[str]:
        """Return the names of the log files, those of ranks in the order of their numbers."""
        try:
            entries = sorted(entry.name for entry in os.scandir(self.path / "logs") if entry.name.endswith(".log"))
        except OSError:
            return []
        return sorted(entries[:1000], key=lambda name: [int(part) for part in re.findall(r"\d{1,9}", name)])

    def size_and_time(self, name: str) -> tuple[int, float]:
        """Return the size in bytes and the time of the last change of a file; zeros where it is missing."""
        try:
            status = self.file(name).stat()
        except (Absent, OSError):
            return 0, 0.0
        return status.st_size, status.st_mtime


class Runs:
    """The runs below a folder.

    Raises:
        UsageError: there is no such folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            what = "is a file" if root.exists() else "no such folder"
            raise UsageError(f"{root}: {what}; give the folder that holds your runs, such as runs")
        self.root = root.resolve()

    def names(self) -> list[str]:
        """Return the names of all runs, which are their paths below the folder, in no particular order."""
        found = []
        for name in self._walk(self.root, PurePosixPath(), depth=0):
            found.append(name)
            if len(found) == MAX_RUNS:
                break
        return found

    def run(self, name: str) -> RunFiles:
        """Return the run that ``names`` lists as ``name``.

        Raises:
            Absent: there is no such run; a name that leaves the folder, or passes through a link, is none.
        """
        parts = name.split("/")
        if len(name) > MAX_NAME or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise Absent(name)
        path = self.root.joinpath(*parts)
        try:
            is_run = path.resolve(strict=True) == path and path.is_dir() and _is_run(path)
        except (OSError, ValueError, RuntimeError) as error:
            raise Absent(name) from error
        if not is_run:
            raise Absent(name)
        return RunFiles(path)

    def _walk(self, folder: Path, name: PurePosixPath, *, depth: int) -> Iterator[str]:
        if depth and _is_run(folder):
            yield str(name)
            return
        if depth == MAX_DEPTH:
            return
        try:
            # Links are not followed: they may lead out, or in a circle.
            entries = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for entry in entries:
            if not entry.startswith(".") and _is_text(entry):
                yield from self._walk(folder / entry, name / entry, depth=depth + 1)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SIGNS)


def _is_text(name: str) -> bool:
    """Return whether a file name can be written into a page; bytes that are no UTF-8 cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(content: bytes) -> str:
    """Return the text of a log, without colours and other control characters."""
    text = content.decode("utf-8", errors="replace")
    lines = (line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n"))  # of a progress bar, the end
    return _ESCAPES.sub("", "\n".join(lines))
