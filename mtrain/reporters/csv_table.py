"""The reporter ``csv``: one row per epoch in ``metrics.csv``, with columns like those of YOLOv5's ``results.csv``."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.core.reporter import Record, ReportedRun, Reporter
from mtrain.report.history import rate_of

FILE = "metrics.csv"
HEAD = ("epoch", "update")


class CsvTable(Reporter):
    """Writes ``metrics.csv``: a row at each evaluation, and at the end of an epoch that has none.

    Columns: ``epoch`` (of the row's updates, from 0), ``update`` (updates so far), ``train/<loss>_loss`` (means of the
    recorded updates since the row before), ``metrics/<figure>`` (of the evaluation) and ``x/lr0``, ``x/lr1`` ... (rates of
    the parameter groups). A resumed job drops the rows after the checkpoint, and goes on.
    """

    def __init__(self, options: Any, run: ReportedRun) -> None:
        super().__init__(options, run)
        self._path = run.folder / FILE
        self._columns: list[str] = []
        self._sums: dict[str, float] = {}
        self._count = 0
        self._last: Record = {}
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
        """Write a row with the figures."""
        self._row(record["figures"], update=record["update"])

    def end(self, record: Record) -> None:
        """Write the row of an epoch that was not evaluated."""
        if self._count:
            self._row({})

    def failure(self, record: Record) -> None:
        """As at any other end."""
        self.end(record)

    def _row(self, figures: Mapping[str, Any], *, update: int | None = None) -> None:
        last = self._last
        row: dict[str, Any] = {
            "epoch": last.get("epoch", ""),
            "update": int(last.get("update", -1)) + 1 if update is None else update,
        }
        row |= {f"train/{name}_loss": total / self._count for name, total in self._sums.items() if self._count}
        row |= {f"metrics/{name}": value for name, value in figures.items()}
        rates = last.get("rates") or [rate_of(last)]
        row |= {f"x/lr{number}": rate for number, rate in enumerate(rates) if rate is not None}
        self._sums, self._count = {}, 0
        if set(row) - set(self._columns):  # A figure may appear late: that of a class without objects so far.
            self._columns = _ordered({*self._columns, *row}, row)
            self._rewrite(_read(self._path))
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Write the file anew with the present columns; nothing if there are none and no rows."""
        if not self._columns:
            self._columns = list(rows[0]) if rows else []
        if not self._columns:
            self._path.unlink(missing_ok=True)
            return
        temporary = self._path.with_name(f".{FILE}")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._path)


def _ordered(names: set[str], row: Mapping[str, Any]) -> list[str]:
    """Return the columns: epoch and update, losses, figures, rates; within each as in ``row``, then those of old rows."""
    known = [*row, *sorted(names - set(row))]
    groups = ("train/", "metrics/", "x/")
    return [*HEAD, *(name for group in groups for name in known if name.startswith(group))]


def _read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; a half-written last one is left out."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [dict(row) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    return [row for row in rows if None not in row and (row.get("update") or "").isdigit()]
