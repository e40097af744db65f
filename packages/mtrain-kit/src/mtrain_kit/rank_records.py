"""Records that the ranks of the kit write while they work, for the process that started them, even if they crash."""

import faulthandler
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtrain_kit.checks import Check, Measure

FACTS = "facts.json"
STUCK = ".stacks"
"""Suffix of the files in which a rank that takes too long leaves its stacks."""


class RankRecord:
    """The measures of one rank, written as one JSON object per line."""

    def __init__(self, run_dir: Path, number: int, *, limit_s: float) -> None:
        self._path = _folder(run_dir) / f"rank-{number}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = self._path.with_suffix(STUCK).open("w", encoding="utf-8")
        self._rank = number
        self._limit_s = limit_s

    @contextmanager
    def of(self, check: Check) -> Iterator[list[Measure]]:
        """Surround a check, which fills the list; the process ends if the check takes too long."""
        # A rank that hangs within a library can be ended, and its place told, from a thread of C only.
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._stacks)
        measures: list[Measure] = []
        yield measures
        faulthandler.cancel_dump_traceback_later()
        entry = {"check": check.id, "measures": [asdict(replace(m, rank=self._rank)) for m in measures]}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True, kw_only=True)
class JobRecords:
    """The records of all ranks of a job that has ended."""

    ranks: Sequence[Mapping[str, Sequence[Measure]]]
    """Measures of each rank, by id of the checks that it has finished."""

    @classmethod
    def of(cls, run_dir: Path, ranks: int) -> "JobRecords":
        """Read the records of the job in ``run_dir``; an incomplete line is ignored."""
        return cls(ranks=[_read(_folder(run_dir) / f"rank-{rank}.jsonl") for rank in range(ranks)])

    def is_finished(self, check: Check) -> bool:
        """Return whether every rank has finished the check."""
        return all(check.id in measures for measures in self.ranks)

    def measures(self, check: Check) -> list[Measure]:
        """Return the measures of all ranks."""
        return [measure for measures in self.ranks for measure in measures.get(check.id, ())]


def _folder(run_dir: Path) -> Path:
    return run_dir / "conformance"


def _read(path: Path) -> dict[str, list[Measure]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    # A rank that was killed may leave half a line.
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return {entry["check"]: [Measure(**values) for values in entry["measures"]] for entry in entries}


def write_facts(run_dir: Path, **facts: Any) -> None:
    """Write plain values for the process that started the ranks. Only rank 0 calls this."""
    folder = _folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(facts))


def read_facts(run_dir: Path) -> dict[str, Any]:
    """Read the values that rank 0 has written; empty if there are none."""
    try:
        facts: dict[str, Any] = json.loads((_folder(run_dir) / FACTS).read_text())
    except (OSError, ValueError):
        return {}
    return facts


def stuck(run_dir: Path) -> str:
    """Name the ranks that took too long, and their stacks; empty: none."""
    files = [file for file in sorted(_folder(run_dir).glob(f"rank-*{STUCK}")) if file.stat().st_size]
    if not files:
        return ""
    ranks = ", ".join(file.stem.removeprefix("rank-") for file in files)
    return f"not done in time: rank{'s' if len(files) > 1 else ''} {ranks}; stacks in {_folder(run_dir)}/rank-*{STUCK}"
