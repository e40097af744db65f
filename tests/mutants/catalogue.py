"""The catalogue of small faults: read, and checked against the source without running anything."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CATALOGUE = Path(__file__).parent / "catalogue.toml"


class Stale(Exception):
    """An entry of the catalogue no longer fits the source; the message names it and what to do."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One small change of one file, and the tests that must notice it."""

    id: str
    area: str
    file: str
    old: str
    new: str
    killers: tuple[str, ...]
    equivalent: str = ""
    """Why no test can notice it, for a change that alters nothing that can be seen."""

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
                f"correct the entry in {CATALOGUE.name}: {self.old!r}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text


def read(path: Path = CATALOGUE) -> list[Fault]:
    """All entries, in the order of the file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**entry, "killers": tuple(entry["killers"])}) for entry in entries]
