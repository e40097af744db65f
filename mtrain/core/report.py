"""What a run writes about itself: ``metrics.jsonl``, TensorBoard events, ``summary.json``, ``results.png``.

Rank 0 gets ``Reporter``, the other ranks ``SilentReporter``: callers need no rank test. One JSON object per line,
always with ``kind`` and ``time`` (seconds since 1970): "start", "update", "evaluation", "checkpoint", "note", "warning", "end".
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mtrain.core.errors import TrainingError

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
RESULTS = "results.png"


class Report(Protocol):
    """What the training loop sees on every rank."""

    def update(self, record: Mapping[str, Any]) -> None:
        """One update: ``update`` (0-based, the one just run), ``epoch``, ``position``, ``updates_per_epoch``,
        ``total_updates``, ``losses`` {name: value}, ``rate``, ``momentum``, ``norm``, ``samples_per_s``, ``wait_share``
        (0 to 1), ``memory_bytes``, ``seconds``, ``skipped``."""
        ...

    def evaluation(self, figures: Mapping[str, float], *, update: int, epoch: int, **fields: Any) -> None:
        """Figures of the evaluation split after ``update`` updates; ``fields``: e.g. ``best`` (bool), ``seconds``."""
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """Anything else: ``event("checkpoint", update=1200, path="...")``, ``event("end", reason="done")``."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and the picture, end. Nothing may be reported afterwards."""
        ...


class SilentReporter:
    """The same methods, no effect: for the ranks that do not report."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Nothing: rank 0 reports."""

    def evaluation(self, figures: Mapping[str, float], *, update: int, epoch: int, **fields: Any) -> None:
        """Nothing: rank 0 reports."""

    def event(self, kind: str, **fields: Any) -> None:
        """Nothing: rank 0 reports."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Nothing: rank 0 reports."""


class Reporter:
    """Writes to the run folder ``folder``; ``start_update`` is where this process begins (0, or where it resumes)."""

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = True,
        plots: bool = True,
        start_update: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = Path(folder)
        self._plots = plots
        self._clock = clock
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _end_last_line(self.folder / METRICS)
        self._lines = (self.folder / METRICS).open("a", encoding="utf-8", buffering=1)
        self._events = None
        if tensorboard:
            from mtrain.core.report_tensorboard import Events

            self._events = Events(self.folder / "tensorboard", start_update=start_update)

    def update(self, record: Mapping[str, Any]) -> None:
        """See ``Report.update``."""
        self._line("update", record)
        if self._events is not None:
            self._events.update(record)

    def evaluation(self, figures: Mapping[str, float], *, update: int, epoch: int, **fields: Any) -> None:
        """See ``Report.evaluation``."""
        self._line("evaluation", {"update": update, "epoch": epoch, "figures": dict(figures), **fields})
        if self._events is not None:
            self._events.evaluation(figures, update=update)

    def event(self, kind: str, **fields: Any) -> None:
        """See ``Report.event``."""
        self._line(kind, fields)

    def close(self, summary: Mapping[str, Any]) -> None:
        """See ``Report.close``."""
        if self._lines.closed:
            return
        self._lines.close()
        if self._events is not None:
            self._events.close()
        write_json(self.folder / SUMMARY, summary)
        if self._plots:
            from mtrain.core.report_plots import draw_results

            draw_results(self.folder)

    def _line(self, kind: str, fields: Mapping[str, Any]) -> None:
        record = {"kind": kind, "time": round(self._clock(), 3), **finite(fields)}
        try:
            self._lines.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise TrainingError(
                f"{self.folder / METRICS} cannot be written: {error.strerror or error}; make room, then go on with --resume"
            ) from error


def finite(value: Any) -> Any:
    """``value`` as JSON can hold it: numbers that are not finite become null, numpy's and paths become plain ones."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return str(value)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, in one step: a reader sees the former content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def _end_last_line(path: Path) -> None:
    """Close the line that a killed writer left half-written, so that the next record stands on its own."""
    try:
        with path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")
    except FileNotFoundError:
        return
