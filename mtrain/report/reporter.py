"""Write the reports of a run: ``metrics.jsonl``, TensorBoard events, ``summary.json`` and ``results.png``.

Rank 0 uses ``Reporter``, the other ranks ``SilentReporter``, so that callers need not distinguish ranks. Each line of
``metrics.jsonl`` is a JSON object, always with ``time`` (seconds since 1970) and ``kind``: "start", "update",
"evaluation", "checkpoint", "note", "warning" or "end".
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mtrain.errors import TrainingError

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
RESULTS = "results.png"


class Report(Protocol):
    """The interface through which the training loop reports, on every rank."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Report one update.

        The record holds ``update`` (0-based, the one just run), ``epoch``, ``position``, ``updates_per_epoch``,
        ``total_updates``, ``losses`` {name: value}, ``rate``, ``momentum``, ``norm``, ``samples_per_s``, ``wait_share``
        (0 to 1), ``memory_bytes``, ``seconds``, ``skipped``.
        """
        ...

    def evaluation(self, figures: Mapping[str, float], *, update: int, epoch: int, **fields: Any) -> None:
        """Report figures of the evaluation split after ``update`` updates.

        ``fields`` holds further values, for example ``best`` (bool) and ``seconds``.
        """
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """Report any other event: ``event("checkpoint", update=1200, path="...")``, ``event("end", reason="done")``."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and the picture of the curves, and end. Nothing may be reported afterwards."""
        ...


class SilentReporter:
    """A ``Report`` without effect, for the ranks that do not report."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Nothing: rank 0 reports."""

    def evaluation(self, figures: Mapping[str, float], *, update: int, epoch: int, **fields: Any) -> None:
        """Nothing: rank 0 reports."""

    def event(self, kind: str, **fields: Any) -> None:
        """Nothing: rank 0 reports."""

    def close(self, summary: Mapping[str, Any]) -> None:
        """Nothing: rank 0 reports."""


class Reporter:
    """Writes the reports into the run folder ``folder``.

    ``start_update`` is the first update of this process: 0, or the one from which the run is resumed.
    """

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
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _end_last_line(self.folder / METRICS)
            self._lines = (self.folder / METRICS).open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise self._unwritable(METRICS, error) from error
        self._events = _events(self.folder, start_update) if tensorboard else None

    def update(self, record: Mapping[str, Any]) -> None:
        """See ``Report.update``."""
        self._line("update", record)
        self._draw_events(lambda events: events.update(record))

    def evaluation(self, figures: Mapping[str, float], *, update: int, epoch: int, **fields: Any) -> None:
        """See ``Report.evaluation``."""
        self._line("evaluation", {"update": update, "epoch": epoch, "figures": dict(figures), **fields})
        self._draw_events(lambda events: events.evaluation(figures, update=update))

    def event(self, kind: str, **fields: Any) -> None:
        """See ``Report.event``."""
        self._line(kind, fields)

    def close(self, summary: Mapping[str, Any]) -> None:
        """See ``Report.close``."""
        if self._lines.closed:
            return
        try:
            self._lines.close()
            self._draw_events(lambda events: events.close())
            write_json(self.folder / SUMMARY, summary)
        except OSError as error:
            raise self._unwritable(SUMMARY, error) from error
        if self._plots:
            self._draw()

    def _draw(self) -> None:
        from mtrain.report.plots import draw_results

        try:
            draw_results(self.folder)
        except OSError as error:  # A finished job must not fail because its picture cannot be drawn.
            log.warning("%s could not be drawn: %s", self.folder / RESULTS, error.strerror or error)

    def _draw_events(self, write: Callable[[Any], None]) -> None:
        """Write to TensorBoard's files. After a failure, log a warning and write no more of them; the job continues."""
        if self._events is None:
            return
        try:
            write(self._events)
        except OSError as error:
            self._events = None
            message = f"TensorBoard's events cannot be written any more: {error.strerror or error}"
            log.warning("%s", message)
            if not self._lines.closed:
                self._line("warning", {"message": message})

    def _line(self, kind: str, fields: Mapping[str, Any]) -> None:
        record = {"kind": kind, "time": round(self._clock(), 3), **finite(fields)}
        try:
            self._lines.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise self._unwritable(METRICS, error) from error

    def _unwritable(self, name: str, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self.folder / name} cannot be written: {error.strerror or error}; make room, then go on with --resume"
        )


def _events(folder: Path, start_update: int) -> Any:
    """Return the writer of TensorBoard's events; None if they cannot be written, which must not fail the job."""
    from mtrain.report.tensorboard import Events

    try:
        return Events(folder / "tensorboard", start_update=start_update)
    except OSError as error:
        log.warning("TensorBoard's events cannot be written: %s", error.strerror or error)
        return None


def finite(value: Any) -> Any:
    """Convert ``value`` to what JSON can hold: non-finite numbers become null, numpy values plain ones, paths text."""
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
    """Write ``value`` as JSON. The file is replaced in one step, so a reader sees either the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json_text(value), encoding="utf-8")
    temporary.replace(path)


def json_text(value: Any) -> str:
    """Return ``value``, converted by ``finite``, as the text of a JSON file."""
    return json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"


def _end_last_line(path: Path) -> None:
    """End a line that a killed writer has left half written, so that the next record begins on a line of its own."""
    try:
        with path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")
    except FileNotFoundError:
        return
