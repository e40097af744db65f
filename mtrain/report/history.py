"""Reading ``metrics.jsonl`` back: while it grows, and whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.files import parse_json

Record = Mapping[str, Any]


class Tail:
    """New records of a growing file; starts at its present end, or at ``from_start``. A half-written line waits."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.path = path
        self._offset = 0 if from_start or not path.exists() else path.stat().st_size

    def read(self) -> list[Record]:
        """Records that were completed since the last call; lines that are no JSON object are passed over."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for record in map(_parsed, whole.splitlines()) if record]


@dataclass(kw_only=True)
class History:
    """The records of one run, each update once: what a resumed run did again replaces what it did first."""

    updates: dict[int, Record] = field(default_factory=dict)
    evaluations: dict[int, Record] = field(default_factory=dict)
    start: Record = field(default_factory=dict)
    end: Record | None = None
    checkpoints: int = 0

    def add(self, record: Record) -> None:
        """Take the next record, in the order of the file."""
        kind, update = record.get("kind"), record.get("update")
        if kind == "start":
            self._forget_from(int(update or 0))
            self.start, self.end = record, None
        elif kind == "update" and isinstance(update, int):
            self.updates[update] = record
        elif kind == "evaluation" and isinstance(update, int):
            self.evaluations[update] = record
        elif kind == "checkpoint":
            self.checkpoints += 1
        elif kind == "end":
            self.end = record

    def _forget_from(self, update: int) -> None:
        """A run that starts at ``update`` has undone what was written after it."""
        self.updates = {number: record for number, record in self.updates.items() if number < update}
        self.evaluations = {
            number: record for number, record in self.evaluations.items() if number <= update and update
        }


def read_history(path: Path) -> History:
    """The whole file; empty when it does not exist."""
    history = History()
    for record in Tail(path, from_start=True).read():
        history.add(record)
    return history


def rate_of(record: Record) -> float | None:
    """Learning rate of an update record: of the last group, the one without exceptions, if there are several."""
    rate = record.get("rate", record.get("rates"))
    if isinstance(rate, list):
        rate = rate[-1] if rate else None
    return float(rate) if isinstance(rate, int | float) else None


def _parsed(line: bytes) -> Record | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
