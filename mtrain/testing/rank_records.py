"""What ranks of the kit write down while they work, and the starter reads whatever becomes of them."""

import faulthandler
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtrain.testing.checks import Check, Measure

FACTS = "facts.json"
STUCK = ".stacks"
"""Suffix of the files in which a rank that takes too long leaves where it is."""


class Diary:
    """What one rank has measured, one JSON object per line."""

    def __init__(self, run_dir: Path, number: int, *, limit_s: float) -> None:
        self._path = _folder(run_dir) / f"rank-{number}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = self._path.with_suffix(STUCK).open("w", encoding="utf-8")
        self._rank = number
        self._limit_s = limit_s

    @contextmanager
    def of(self, check: Check) -> Iterator[list[Measure]]:
        """Surrounds a check, which fills the list; the process ends where it takes too long."""
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._stacks)
        measures: list[Measure] = []
        yield measures
        faulthandler.cancel_dump_traceback_later()
        entry = {"check": check.id, "measures": [asdict(replace(m, rank=self._rank)) for m in measures]}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The diaries of all ranks of a job that has ended."""

    ranks: Sequence[Mapping[str, Sequence[Measure]]]
    """Of each: id of a check that it has finished -> what it measured."""

    @classmethod
    def of(cls, run_dir: Path, ranks: int) -> "Pages":
        """Of the job in ``run_dir``; a line that a rank did not finish is none."""
        return cls(ranks=[_read(_folder(run_dir) / f"rank-{rank}.jsonl") for rank in range(ranks)])

    def finished(self, check: Check) -> bool:
        """Whether every rank has."""
        return all(check.id in measures for measures in self.ranks)

    def measures(self, check: Check) -> list[Measure]:
        """Of all ranks."""
        return [measure for measures in self.ranks for measure in measures.get(check.id, ())]


def _folder(run_dir: Path) -> Path:
    return run_dir / "conformance"


def _read(path: Path) -> dict[str, list[Measure]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return {entry["check"]: [Measure(**values) for values in entry["measures"]] for entry in entries}


def tell(run_dir: Path, **facts: Any) -> None:
    """Rank 0 leaves plain values for the starter."""
    folder = _folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(facts))


def told(run_dir: Path) -> dict[str, Any]:
    """What rank 0 has left; empty: nothing."""
    try:
        facts: dict[str, Any] = json.loads((_folder(run_dir) / FACTS).read_text())
    except (OSError, ValueError):
        return {}
    return facts


def stuck(run_dir: Path) -> str:
    """Which ranks took too long, and where they were; empty: none."""
    files = [file for file in sorted(_folder(run_dir).glob(f"rank-*{STUCK}")) if file.stat().st_size]
    if not files:
        return ""
    ranks = ", ".join(file.stem.removeprefix("rank-") for file in files)
    return f"not done in time: rank{'s' if len(files) > 1 else ''} {ranks}; stacks in {_folder(run_dir)}/rank-*{STUCK}"
