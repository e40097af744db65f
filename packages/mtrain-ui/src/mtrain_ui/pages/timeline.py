"""The records of a run as curves: read while the file grows, in bounded memory, whatever a line holds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.record_files import METRICS
from mtrain.records.history import UPDATE_LINE, Record, Tail
from mtrain.records.wording import headline_metrics
from mtrain_ui.pages.folder import Absent, RunFiles

MAX_ROWS = 4000
"""Updates that are kept at most; of a longer run every second, fourth ... one."""
MAX_EVALUATIONS = 2000
MAX_NAMES = 8
"""Losses, groups or metrics that have a curve."""
MAX_EVENTS = 200
CHUNK_BYTES = 4 << 20
# A folder of strangers may hold more than any run has written.
MAX_BYTES = 64 << 30
"""Bytes of ``metrics.jsonl`` that are read: those of 10^8 updates."""
Series = tuple[Array, Array]
"""Updates (U,) and values (U,) of one curve."""


@dataclass(kw_only=True)
class Timeline:
    """The records of one run so far."""

    updates: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    starts: list[Record] = field(default_factory=list)
    """The start of each attempt and each resumption."""
    ends: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    """Notes and warnings."""
    copied: Record = field(default_factory=dict)
    """The newest copy of a checkpoint; empty if there is none."""
    end: Record | None = None
    """How the last attempt ended; None: it has not."""
    stride: int = 1
    """Of how many recorded updates one is kept."""
    _count: int = 0

    @property
    def start(self) -> Record:
        """The start of the last attempt; empty if there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def last_update(self) -> Record:
        """The record of the last update that is kept; empty if there is none."""
        return self.updates[-1] if self.updates else {}

    def add(self, record: Record) -> None:
        """Add the next record, in the order of the file."""
        kind, update = record.get("kind"), number_of(record.get("update"))
        if kind == "start":
            self._begin(record, update or 0.0)
        elif kind == "update" and update is not None:
            self._add_update(record)
        elif kind == "evaluation" and update is not None and len(self.evaluations) < MAX_EVALUATIONS:
            self.evaluations.append(record)
        elif kind in ("note", "warning") and len(self.events) < MAX_EVENTS:
            self.events.append(record)
        elif kind == "copy":
            self.copied = record
        elif kind == "end":
            self.end = record
            self.ends = [*self.ends, record][-MAX_EVENTS:]

    def skips(self, line: bytes) -> bool:
        """Return whether a line is that of an update that is not kept; it need not be read then."""
        if not line.startswith(UPDATE_LINE) or self._count % self.stride == 0:
            return False
        self._count += 1
        return True

    def copy(self) -> "Timeline":
        """Return the state of now, which does not change when records are added."""
        return replace(
            self,
            updates=list(self.updates),
            evaluations=list(self.evaluations),
            starts=list(self.starts),
            ends=list(self.ends),
            events=list(self.events),
        )

    def _begin(self, record: Record, update: float) -> None:
        """Begin an attempt: what was recorded after the state that it goes on from is repeated."""
        self.updates = [each for each in self.updates if each["update"] < update]
        self.evaluations = [each for each in self.evaluations if each["update"] <= update and update]
        self.starts = [*self.starts, record][-MAX_EVENTS:]
        self.end = None

    def _add_update(self, record: Record) -> None:
        if self._count % self.stride == 0:
            self.updates.append(record)
        self._count += 1
        if len(self.updates) > MAX_ROWS:
            # Halving keeps the curve even: dropping the oldest ones would lose the beginning.
            self.updates = self.updates[::2]
            self.stride *= 2

    # -------------------------------------------------------------------------------------------------------- curves
    def losses(self) -> dict[str, Series]:
        """Return the curve of each loss, the total first."""
        names = dict.fromkeys(name for record in self.updates for name in mapping_of(record.get("losses")))
        ordered = sorted(names, key=lambda name: name != "total")[:MAX_NAMES]
        return {name: self._of_updates(lambda r, n=name: mapping_of(r.get("losses")).get(n)) for name in ordered}  # type: ignore[misc]

    def rates(self) -> dict[str, Series]:
        """Return the learning rate of each group of parameters; only one where all are equal."""
        lists = [record["learning_rates"] for record in self.updates if isinstance(record.get("learning_rates"), list)]
        count = min(max((len(rates) for rates in lists), default=0), MAX_NAMES)
        if all(len({str(learning_rate) for learning_rate in rates}) <= 1 for rates in lists):
            return {"learning_rate": self._of_updates(lambda record: record.get("learning_rate"))}

        def of_group(number: int) -> Series:
            return self._of_updates(lambda record: _item(record.get("learning_rates"), number))

        return {f"group {number}": of_group(number) for number in range(count)}

    def column(self, name: str, *, factor: float = 1.0) -> Series:
        """Return the curve of a number in the records of updates, such as ``gradient_norm`` or ``data_wait_share``."""
        x, y = self._of_updates(lambda record: record.get(name))
        return x, factor * y

    def metrics(self) -> dict[str, Series]:
        """Return the curves of the headline metrics over the updates that had been made."""
        names = list(dict.fromkeys(name for record in self.evaluations for name in headline_of(record)))[:MAX_NAMES]
        return {
            name: _series(self.evaluations, lambda r, n=name: mapping_of(r.get("metrics")).get(n))  # type: ignore[misc]
            for name in names
        }

    def _of_updates(self, value: Callable[[Record], Any]) -> Series:
        return _series(self.updates, value)

    def best(self) -> Record | None:
        """Return the evaluation with the highest score so far."""
        scored = [(score, place) for place, r in enumerate(self.evaluations) if (score := _score(r)) is not None]
        return self.evaluations[max(scored)[1]] if scored else None


def _series(records: list[Record], value: Callable[[Record], Any]) -> Series:
    points = [(number_of(r.get("update")), number_of(value(r))) for r in records]
    kept = [(x, y) for x, y in points if x is not None and y is not None]
    return np.array([x for x, _ in kept], dtype=float), np.array([y for _, y in kept], dtype=float)


def _score(record: Record) -> float | None:
    return number_of(mapping_of(record.get("metrics")).get("score"))


def headline_of(record: Record) -> Mapping[str, float]:
    """Return the metrics of an evaluation that have a curve."""
    metrics = {str(name): value for name, value in mapping_of(record.get("metrics")).items()}
    names = record.get("headline")
    headline = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return headline_metrics({"metrics": metrics, "headline": headline})


def number_of(value: Any) -> float | None:
    """Return a finite number of a record; None for anything else, which a damaged file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def mapping_of(value: Any) -> Mapping[str, Any]:
    """Return a mapping of a record; empty for anything else, which a damaged file may hold."""
    return value if isinstance(value, Mapping) else {}


def _item(value: Any, number: int) -> Any:
    return value[number] if isinstance(value, list) and number < len(value) else None


class Follower:
    """Reads the records of a run as they are written. A line that is half written is read once it is whole."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self.timeline = Timeline()
        self._tail: Tail | None = None
        self._size = 0
        """Bytes of the file that are to be read."""
        self._is_whole = True
        """Whether the last call came to the end of the file."""

    @property
    def read_percent(self) -> int:
        """How much of the file has been read; 100 only for all of it, apart from a line that is not whole."""
        return 100 if self._is_whole or not self._size else min(99, 100 * self._offset // self._size)

    @property
    def _offset(self) -> int:
        return self._tail.offset if self._tail else 0

    def refresh(self, *, limit: int = MAX_BYTES) -> Timeline:
        """Return the curves with the records that were written since the last call.

        ``limit``: bytes after which it ends where the file has more; the next call goes on. Whole chunks are read.
        """
        self._is_whole = True
        try:
            path = self._run.file(METRICS)
            self._size = min(path.stat().st_size, MAX_BYTES)
        except (Absent, OSError):
            return self.timeline
        # A file that has shrunk was written anew, by a run of the same name.
        if self._tail is None or self._tail.path != path or self._size < self._tail.offset:
            self._tail, self.timeline = Tail(path, from_start=True), Timeline()
        end = self._tail.offset + limit
        while self._tail.offset < self._size:
            before = self._tail.offset
            if before >= end:
                self._is_whole = False
                break
            for record in self._tail.iterate(limit=CHUNK_BYTES, skip=self.timeline.skips):
                self.timeline.add(record)
            if self._tail.offset == before:
                break
        return self.timeline
