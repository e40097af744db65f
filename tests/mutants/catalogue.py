"""The catalogue of small faults: read, and checked against the source without running anything.

Each is a fault that somebody could make, with the tests that must notice it. ``make mutants`` plants them one at a time
in a copy of the source and prints which survive. A bug that was found belongs here, with the test that was written for
it. ``catalogue/ROOM.toml`` holds the faults of ``mtrain/ROOM`` or ``mtrain/ROOM.py``, or of the package ``ROOM``.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
CATALOGUE = Path(__file__).parent / "catalogue"


class Stale(Exception):
    """An entry of the catalogue no longer fits the source; the message names it and what to do."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One small change of one file, and the tests that must notice it."""

    id: str
    area: str
    file: str
    """Path below the root of the repository."""
    old: str
    """Found in the file exactly once; begins or ends in the middle of a line where that is enough to tell the place."""
    new: str
    killers: tuple[str, ...]
    """Ids of tests, as narrow as possible; one that fails is enough."""
    equivalent: str = ""
    """Why no test can notice it, for a change that alters nothing that can be seen."""

    @property
    def room(self) -> str:
        """Name of the folder or module of mtrain that the file is in, of its package, or of the file's top folder."""
        parts = PurePosixPath(re.sub(r"^(mtrain|packages/[^/]+/src)/", "", self.file)).parts
        return parts[0].removesuffix(".py")

    def apply(self, root: Path) -> str:
        """Plant it below ``root``; returns the text that was there before.

        Raises:
            Stale: ``old`` is not found exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        actual = text.count(self.old)
        if actual != 1:
            raise Stale(
                f"{self.id}: `old` is found {actual} times in {self.file}, expected once; "
                f"correct the entry in {CATALOGUE.name}/{self.room}.toml: {self.old!r}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text


def read(path: Path = CATALOGUE) -> list[Fault]:
    """All entries of a folder's files, by the files' names, or of one file."""
    files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    entries = [entry for file in files for entry in tomllib.loads(file.read_text(encoding="utf-8"))["fault"]]
    return [Fault(**{**entry, "killers": tuple(entry["killers"])}) for entry in entries]
