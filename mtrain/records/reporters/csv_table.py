"""The reporter ``csv``: one row per epoch in ``metrics.csv``, as YOLOv5's ``results.csv`` has."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.core.interfaces.reporter import Record, ReportedRun, Reporter
from mtrain.records.history import learning_rate_of
from mtrain.spec import outputs
from mtrain.spec.files import read_text

FILE = "metrics.csv"
HEAD = ("epoch", "update")
MAX_BYTES = 256 << 20
"""Largest table that is written anew with further columns."""


class CsvTable(Reporter):
    """Writes ``metrics.csv``: a row at each evaluation, and at the end of an epoch that has none.

    Columns: ``epoch`` (of the row's updates, from 0), ``update`` (updates so far), ``loss/<loss>`` (means of the
    recorded updates since the row before), ``metric/<metric>`` (of the evaluation) and ``learning_rate/0``, ``learning_rate/1`` ...
    (of the parameter groups). A resumed job drops the rows after the checkpoint, and goes on.
    """

    def __init__(self, options: Any, run: ReportedRun) -> None:
        super().__init__(options, run)
        self._path = run.folder / FILE
        self._columns: list[str] = []
        self._sums: dict[str, float] = {}
        self._count = 0
        self._last: Record = {}
        # A resumed job repeats what came after its checkpoint.
        kept = [row for row in _read(self._path) if run.start_update >= int(row["update"] or 0) > 0]
        self._rewrite(kept)

    def update(self, record: Record) -> None:
        """Add the losses to the row that comes next; write the row first if it is of an earlier epoch."""
        if self._count and record["epoch"] != self._last["epoch"]:
            self._row({})
        self._last = record
        self._count += 1
        for name, value in record["losses"].items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def evaluation(self, record: Record) -> None:
        """Write a row with the metrics."""
        self._row(record["metrics"], update=record["update"])

    def end(self, record: Record) -> None:
        """Write the row of an epoch that was not evaluated."""
        if self._count:
            self._row({})

    def failure(self, record: Record) -> None:
        """As at any other end."""
        self.end(record)

    def _row(self, metrics: Mapping[str, Any], *, update: int | None = None) -> None:
        last = self._last
        row: dict[str, Any] = {
            "epoch": last.get("epoch", ""),
            "update": int(last.get("update", -1)) + 1 if update is None else update,
        }
        row |= {f"loss/{name}": total / self._count for name, total in self._sums.items() if self._count}
        row |= {f"metric/{name}": value for name, value in metrics.items()}
        rates = last.get("learning_rates") or [learning_rate_of(last)]
        row |= {
            f"learning_rate/{number}": learning_rate
            for number, learning_rate in enumerate(rates)
            if learning_rate is not None
        }
        self._sums, self._count = {}, 0
        if set(row) - set(self._columns):  # A metric may appear late: that of a class without objects so far.
            self._columns = _order({*self._columns, *row}, row)
            self._rewrite(_read(self._path))
        with outputs.open_to_write(self._path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Write the file anew with the present columns; nothing if there are none and no rows."""
        if not self._columns:
            self._columns = list(rows[0]) if rows else []
        if not self._columns:
            self._path.unlink(missing_ok=True)
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        outputs.write_text(self._path, text.getvalue())


def _order(names: set[str], row: Mapping[str, Any]) -> list[str]:
    """Return the columns: epoch and update, losses, metrics, learning rates; within each as in ``row``, then those of old rows."""
    known = [*row, *sorted(names - set(row))]
    groups = ("loss/", "metric/", "learning_rate")
    return [*HEAD, *(name for group in groups for name in known if name.startswith(group))]


def _read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; a half-written last one is left out."""
    try:
        text = io.StringIO(read_text(path, limit=MAX_BYTES), newline="")
        rows = [dict(row) for row in csv.DictReader(text)]
    except FileNotFoundError:
        return []
    return [row for row in rows if None not in row and (row.get("update") or "").isdigit()]
