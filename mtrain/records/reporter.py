"""The report of a job on one rank: each record goes to the run's files, and to the reporters of this rank.

Each line of ``metrics.jsonl`` is a JSON object, always with ``time`` (seconds since 1970) and ``kind``: "start", "update",
"evaluation", "checkpoint", "copy", "image", "histogram", "note", "warning" or "end".
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mtrain.core.interfaces.reporter import InspectedUpdate, Reporter, tell
from mtrain.core.record_files import METRICS
from mtrain.errors import MtrainError, TrainingError
from mtrain.records.run_files import RunFiles

log = logging.getLogger(__name__)


class Report:
    """Passes each record to the files of the run, if this rank writes them, and to reporters by name.

    A reporter that raises an exception is switched off, with one warning: a record where this rank writes the files, else
    a line of its log. An exception of a ``fatal`` reporter leaves the method that reported.

    Raises:
        TrainingError: a file, or a ``fatal`` reporter, has failed.
    """

    def __init__(
        self,
        files: RunFiles | None,
        reporters: Sequence[tuple[str, Reporter]] = (),
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        kept = {} if files is None else {METRICS: files}
        self._reporters: dict[str, Reporter] = {**kept, **dict(reporters)}
        self._clock = clock

    @property
    def wants_images(self) -> bool:
        """Whether a reporter of this rank asks for images at each evaluation."""
        return any(reporter.draws_images for reporter in self._reporters.values())

    @property
    def inspections(self) -> Sequence[int]:
        """``inspect_every`` of each reporter of this rank that inspects updates."""
        return [reporter.inspect_every for reporter in self._reporters.values() if reporter.inspect_every is not None]

    def inspect(self, update: InspectedUpdate) -> None:
        """Show an update to the reporters of this rank whose ``inspect_every`` asks for it."""
        for name, reporter in list(self._reporters.items()):
            if reporter.inspect_every is not None and update.update % reporter.inspect_every == 0:
                self._guard(name, reporter, partial(reporter.inspect, update))

    def update(self, record: Mapping[str, Any]) -> None:
        """Report one update.

        The record holds ``update`` (0-based, the one just run), ``epoch``, ``position``, ``updates_per_epoch``,
        ``total_updates``, ``losses`` {name: value}, ``learning_rate``, ``momentum``, ``gradient_norm``, ``samples_per_second``,
        ``data_wait_share``
        (0 to 1), ``memory_bytes``, ``update_seconds``, ``skipped_updates``.
        """
        self._report("update", record)

    def evaluation(self, metrics: Mapping[str, float], *, update: int, epoch: int, **fields: Any) -> None:
        """Report metrics of the evaluation split after ``update`` updates.

        ``fields`` holds further values, for example ``best`` (bool) and ``seconds``.
        """
        self._report("evaluation", {"update": update, "epoch": epoch, "metrics": dict(metrics), **fields})

    def event(self, kind: str, **fields: Any) -> None:
        """Report any other event: ``event("checkpoint", update=1200, path="...")``, ``event("end", reason="done")``."""
        self._report(kind, fields)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and the image of the curves, and end. Nothing may be reported afterwards.

        No image is drawn if ``left_out`` of the summary names it.
        """
        if self._files is not None and not self._files.is_closed:
            self._files.close(summary)

    def _report(self, kind: str, fields: Mapping[str, Any]) -> None:
        record = {"kind": kind, "time": round(self._clock(), 3), **fields}
        # The record of a failed job is written while its exception is handled.
        error = sys.exception()
        if kind == "end" and record.get("reason") == "failed":
            record["error"] = "" if error is None else f"{type(error).__name__}: {error}"
        record = plain(record)
        for name, reporter in list(self._reporters.items()):
            # Others get a copy of the record, which they may keep or change.
            own = record if reporter.shares_records else plain(record)
            self._guard(name, reporter, partial(tell, reporter, own))

    def _guard(self, name: str, reporter: Reporter, call: Callable[[], None]) -> None:
        """Call a method of a reporter; switch the reporter off if it fails, and report its trouble."""
        try:
            call()
        except (Exception, SystemExit) as error:  # A reporter of a user may raise any exception, or call sys.exit.
            if reporter.fatal:
                if isinstance(error, MtrainError):
                    raise
                raise TrainingError(f"the reporter {name!r} has failed: {word_error(error)}") from error
            self._reporters.pop(name, None)
            self.report_failure(name, error)
            return
        if reporter.trouble and not self._is_closed():
            sentence, reporter.trouble = reporter.trouble, ""
            self.event("warning", message=f"the reporter {name!r}: {sentence}")

    def report_failure(self, name: str, error: BaseException) -> None:
        """Report that the reporter ``name`` has failed, and receives nothing any more."""
        log.warning("the reporter %r has failed", name, exc_info=error)
        if not self._is_closed():
            self.event("warning", message=f"the reporter {name!r} has failed and is switched off: {word_error(error)}")

    def _is_closed(self) -> bool:
        return self._files is not None and self._files.is_closed


def word_error(error: BaseException) -> str:
    """Return an exception in one line: what the system says of a file, or else its type and its first line."""
    if isinstance(error, MtrainError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


PLAIN = frozenset((float, int, str, bool, type(None)))
"""Classes whose values are plain; those of derived classes may have to be converted."""


def plain(value: Any) -> Any:
    """Return a copy of ``value`` with numpy values as plain ones and everything else as text; numbers may be inf or nan."""
    kind = type(value)
    if kind in PLAIN:  # nearly all values, and much faster than asking what they are instances of
        return value
    if kind is dict or isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # A float64 of numpy is a float of Python too.
        return plain(value.tolist())
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
