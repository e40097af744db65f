"""Sweeps: run to their end, and shown as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_sweep import starting
from mtrain_sweep.request import SweepRequest
from mtrain_sweep.starting import need_libraries

if TYPE_CHECKING:
    from mtrain_sweep.search import Verdict

__all__ = ["SweepRequest", "SweepTable", "need_libraries", "sweep", "table_of"]
FILES = {"table": "trials.csv", "best spec": "best.yml", "trials": "parallel.png", "importance": "importance.png"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTable:
    """The trials of a sweep as text, without columns in which no trial has a value."""

    folder: Path
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None
    """Index of the row of the best trial; None: no trial has reached its end."""
    best_text: str
    files: Mapping[str, Path]
    """The files of the sweep that exist, by what they show."""


def sweep(request: SweepRequest) -> "tuple[Path, Verdict]":
    """Run a sweep to its end; return its folder and how it ended.

    Raises:
        UsageError: the spec, the space or an option is wrong; nothing was started.
    """
    from mtrain_sweep import search as sweeps

    plan = starting.prepare(request)
    return plan.folder, sweeps.run(plan)


def table_of(folder: Path) -> SweepTable:
    """Return the table of a sweep, also while it runs.

    Raises:
        UsageError: it is not the folder of a sweep, or its files are damaged.
    """
    opened = starting.opened(folder)
    from mtrain_sweep.table import best_trial, columns, rows, shown

    names, cells = columns(opened.definition), rows(opened.definition, opened.trials)
    kept = [i for i in range(len(names)) if any(row[i] is not None for row in cells)]
    best = best_trial(opened.definition, opened.trials)
    return SweepTable(
        folder=opened.folder,
        columns=[names[i] for i in kept],
        rows=[[shown(row[i]) for i in kept] for row in cells],
        best=None if best is None else next(i for i, row in enumerate(cells) if row[0] == best.number),
        best_text="" if best is None else f"best: trial {best.number}, {opened.definition.metric} {shown(best.value)}",
        files={word: opened.folder / file for word, file in FILES.items() if (opened.folder / file).exists()},
    )
