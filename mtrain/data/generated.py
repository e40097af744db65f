"""Folders of data sets that mtrain makes itself at their first use."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from mtrain.errors import DataError
from mtrain.spec.files import read_text

MAX_MARK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeSet:
    """A data set that is a function of its options."""

    name: str
    """Beginning of the folder's name in the user's cache."""
    mark: str
    """Name of the file that says with which options a folder was made."""
    format: int
    """Version of the generator; increased when the same options give other files."""
    options: Mapping[str, Any]

    def default_folder(self) -> Path:
        """Return the folder for a set with these options if ``data.root`` is not set."""
        return Path.home() / ".cache" / "mtrain" / f"{self.name}-{sha256(self.content.encode()).hexdigest()[:12]}"

    @property
    def content(self) -> str:
        """Content of the mark."""
        return json.dumps({"format": self.format, **self.options}, sort_keys=True)

    def make(self, directory: Path, write: Callable[[Path], None]) -> Path:
        """Write the set to ``directory`` with ``write`` unless it exists already. Return ``directory``.

        Several processes may do this at once.

        Raises:
            DataError: ``directory`` holds something else, or cannot be written.
        """
        if self._is_made(directory):
            return directory
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            # Built beside its place and renamed: a killed process leaves no incomplete set.
            building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
            try:
                # ``mkdtemp`` gives the folder to this user alone, and others may read a data set.
                building.chmod(0o755)
                write(building)
                (building / self.mark).write_text(self.content, "utf-8")
                self._move(building, directory)
            finally:
                shutil.rmtree(building, ignore_errors=True)
        except OSError as error:
            raise DataError(f"{directory}: the digits cannot be written ({error.strerror}); set data.root") from error
        return directory

    def _is_made(self, directory: Path) -> bool:
        if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
            return False
        mark_file = directory / self.mark
        if not mark_file.is_file():
            raise DataError(f"{directory}: holds something else than the digits; name another or an empty folder")
        try:
            existing = read_text(mark_file, limit=MAX_MARK_BYTES)
        except (OSError, ValueError) as error:
            raise DataError(f"{mark_file}: {getattr(error, 'strerror', None) or error}; remove {directory}") from error
        if existing != self.content:
            raise DataError(
                f"{directory}: made with {existing}, asked for {self.content}; name another folder or remove it"
            )
        return True

    def _move(self, building: Path, directory: Path) -> None:
        try:
            os.rename(building, directory)  # replaces an empty folder, fails on a full one
        except OSError:
            if not self._is_made(directory):  # otherwise another process was faster, with the same result
                raise
