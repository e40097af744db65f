"""The files of a run that mtrain reads back: ``metrics.jsonl`` and ``summary.json``, and the image of its curves."""

import errno
import json
import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain.core.interfaces.reporter import Record, Reporter
from mtrain.core.record_files import METRICS, RESULTS, SUMMARY, finite, write_json
from mtrain.errors import TrainingError
from mtrain.spec import collector, outputs

log = logging.getLogger(__name__)
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class RunFiles(Reporter):
    """The reporter of JSON lines: each record in ``metrics.jsonl``, and at the end ``summary.json`` and ``results.png``.

    Raises:
        TrainingError: a file cannot be written. The job cannot be read back without it, so the job ends.
    """

    fatal = True
    shares_records = True

    def __init__(self, folder: Path, *, plots: bool) -> None:
        self.folder = folder
        self._plots = plots
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            outputs.refuse_links_out(folder)
            _end_last_line(folder / METRICS)
            self._lines = outputs.open_to_write(
                folder / METRICS, "a", encoding="utf-8", errors=outputs.LONE, buffering=1
            )
        except OSError as error:
            if error.errno == errno.ELOOP:  # Its words name the link and say what to do.
                raise TrainingError(f"{folder}: cannot be written to: {error.strerror}") from error
            raise self._unwritable(METRICS, error) from error

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._lines.closed

    def _write(self, record: Record) -> None:
        """Write one line."""
        try:
            self._lines.write(_line(record) + "\n")
        except OSError as error:
            raise self._unwritable(METRICS, error) from error

    start = update = evaluation = checkpoint = copied = image = histogram = message = end = failure = _write

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, and draw the curves, unless ``left_out`` of the summary names their image."""
        try:
            self._lines.close()
            write_json(self.folder / SUMMARY, summary)
        except OSError as error:
            raise self._unwritable(SUMMARY, error) from error
        if self._plots and RESULTS not in summary.get("left_out", ()):
            self._draw()

    def _draw(self) -> None:
        if find_spec("matplotlib") is None:  # The preflight has said so.
            return
        with collector.pause():
            from mtrain.records.plots import draw_results

        try:
            draw_results(self.folder)
        except OSError as error:  # A finished job must not fail because its image cannot be drawn.
            log.warning("%s could not be drawn: %s", self.folder / RESULTS, error.strerror or error)

    def _unwritable(self, name: str, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self.folder / name} cannot be written: {error.strerror or error}; make room, then go on with --resume"
        )


def _line(record: Record) -> str:
    """Return a record as JSON, with null in the place of what JSON has no word for."""
    try:
        return _JSON.encode(record)
    except (TypeError, ValueError):  # it is seldom that a value has to be replaced, so nothing is looked for before
        return _JSON.encode(finite(record))


def _end_last_line(path: Path) -> None:
    """End a line that a killed writer has left half written, so that the next record begins on a line of its own."""
    try:
        with outputs.open_to_write(path, "rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")
    except FileNotFoundError:
        return
