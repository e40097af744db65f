"""Read ``metrics.jsonl``, either while it grows or as a whole."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.errors import UsageError
from mtrain.spec.files import open_file, parse_json

Record = Mapping[str, Any]

UPDATE_LINE = b'{"kind": "update"'
"""How the line of an update begins, as ``run_files`` writes it."""
MAX_LINE_BYTES = 16 << 20
"""Longest line of a file that is read as a whole."""


class Tail:
    """Reads the new records of a growing file, from its present end on or, with ``from_start``, from its beginning.

    A line that is only half written is read once it is complete.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.path = path
        self._offset = 0 if from_start or not path.exists() else path.stat().st_size

    @property
    def offset(self) -> int:
        """Number of bytes that were read."""
        return self._offset

    def read(self, *, limit: int = -1) -> list[Record]:
        """Return the records completed since the last call. Lines that are not JSON objects are skipped.

        ``limit``: largest number of bytes to read now; a longer line is skipped. -1: all that there are.
        """
        return list(self.iterate(limit=limit))

    def iterate(self, *, limit: int = -1, skip: Callable[[bytes], bool] = lambda line: False) -> Iterator[Record]:
        """Yield the records that ``read`` returns, apart from the lines of which ``skip`` returns True, unread."""
        is_all, limit = limit < 0, MAX_LINE_BYTES if limit < 0 else limit
        while True:
            content = _content_from(self.path, self._offset, limit)
            whole = content[: content.rfind(b"\n") + 1]
            is_endless = not whole and len(content) == limit
            whole = content if is_endless else whole
            self._offset += len(whole)
            for line in whole.splitlines():
                if not skip(line) and (record := _parse_record(line)):
                    yield record
            if not is_all or len(content) < limit or is_endless:
                return


@dataclass(kw_only=True)
class History:
    """The records of one run, with each update once: updates that a resumed run repeats replace the earlier records."""

    updates: dict[int, Record] = field(default_factory=dict)
    evaluations: dict[int, Record] = field(default_factory=dict)
    start: Record = field(default_factory=dict)
    end: Record | None = None
    checkpoints: int = 0
    copied: Record = field(default_factory=dict)
    """The newest copy of a checkpoint (``checkpoint.copy_to``); empty if there is none."""
    most_updates: int | None = None
    """Updates that are kept at most, beside the last one; of a longer run every second, fourth ... one. None: all."""
    _stride: int = 1
    _count: int = 0
    _skipped: bytes = b""
    """The line of the newest update that was skipped."""
    _newest: Record | None = None
    """The newest update that was not skipped, which may have been left out since."""

    def skips(self, line: bytes) -> bool:
        """Return whether a line is that of an update that is not kept."""
        # Updates are nearly all lines of a long run. Skipping those that are not kept without parsing takes a twentieth of the time.
        if self.most_updates is None or not line.startswith(UPDATE_LINE):
            return False
        self._count += 1
        skips = (self._count - 1) % self._stride != 0
        self._skipped = line if skips else b""
        return skips

    def add_last(self) -> None:
        """Add the newest update if it was skipped or left out."""
        record = _parse_record(self._skipped) if self._skipped else self._newest
        if record is not None and isinstance(record.get("update"), int):
            self.updates.setdefault(record["update"], record)

    def add(self, record: Record) -> None:
        """Add the next record, in the order of the file."""
        kind, update = record.get("kind"), record.get("update")
        # A job that is resumed repeats the updates after its checkpoint, and may do so with other losses.
        if kind == "start":
            self._forget_from(int(update or 0))
            self.start, self.end = record, None
        elif kind == "update" and isinstance(update, int):
            self.updates[update] = self._newest = record
            if self.most_updates is not None and len(self.updates) > self.most_updates:
                self.updates = dict(list(self.updates.items())[::2])
                self._stride *= 2
        elif kind == "evaluation" and isinstance(update, int):
            self.evaluations[update] = record
        elif kind == "checkpoint":
            self.checkpoints += 1
        elif kind == "copy":
            self.copied = record
        elif kind == "end":
            self.end = record

    def _forget_from(self, update: int) -> None:
        """Drop the records after ``update``, at which a resumed run has started again."""
        self._skipped, self._newest = b"", None
        self.updates = {number: record for number, record in self.updates.items() if number < update}
        self.evaluations = {
            number: record for number, record in self.evaluations.items() if number <= update and update
        }


def read_history(path: Path, *, most_updates: int | None = None) -> History:
    """Read the whole file; the history is empty if the file does not exist. ``most_updates``: see ``History``."""
    history = History(most_updates=most_updates)
    try:
        with open_file(path) as file:
            # The last line may be half written. One without an end is that of a damaged file, and memory has one.
            while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                if not history.skips(line) and (record := _parse_record(line)):
                    history.add(record)
    except FileNotFoundError:
        return history
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    history.add_last()
    return history


def _content_from(path: Path, offset: int, limit: int) -> bytes:
    try:
        with open_file(path) as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def learning_rate_of(record: Record) -> float | None:
    """Return the learning rate in an update record. Of several groups it is that of the last, the general one."""
    learning_rate = record.get("learning_rate", record.get("learning_rates"))
    if isinstance(learning_rate, list):
        learning_rate = learning_rate[-1] if learning_rate else None
    return float(learning_rate) if isinstance(learning_rate, int | float) else None


def pace_of(record: Record) -> tuple[Any, str]:
    """Return how much was trained in a second, and the word for what is counted, such as ``images`` or ``tokens``."""
    unit = record.get("unit")
    unit = unit if isinstance(unit, str) else "images"
    return record.get(f"{unit}_per_second", record.get("samples_per_second")), unit


NUMBERS = (
    "momentum",
    "gradient_norm",
    "samples_per_second",
    "mfu",
    "data_wait_share",
    "memory_bytes",
    "skipped_updates",
)
"""Numbers in the record of an update that have a curve, beside losses and learning rate."""


def points(record: Record) -> dict[str, Any]:
    """Return the numbers of an update's or an evaluation's record under the names that every reporter gives them.

    They are ``loss/NAME`` and ``metric/NAME``, ``learning_rate`` (of the last parameter group, which is the general one)
    and ``NUMBERS``. A number that the record lacks is None.
    """
    if "metrics" in record:
        return {f"metric/{name}": value for name, value in record["metrics"].items()}
    values: dict[str, Any] = {f"loss/{name}": value for name, value in (record.get("losses") or {}).items()}
    return {**values, "learning_rate": learning_rate_of(record), **{name: record.get(name) for name in NUMBERS}}


def _parse_record(line: bytes) -> Record | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and _is_sound(record) else None


def _is_sound(record: Record) -> bool:
    """Return whether the fields that readers count on have their types; those of a damaged file may be anything."""
    tables = (record.get(name) or {} for name in ("metrics", "losses"))
    numbers = (record.get(name) or 0 for name in ("update", "epoch", "total_updates"))
    return all(isinstance(table, dict) for table in tables) and all(isinstance(number, int) for number in numbers)
