"""The common part of reporters for tracking services: parameters, curves, images and checkpoints of one tracked run."""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.checkpoint.store import folder_of
from mtrain.core.interfaces.reporter import Record, ReportedRun, Reporter
from mtrain.errors import PluginError
from mtrain.records.history import points
from mtrain.spec import remedies
from mtrain.spec.disclosure import scrub, shareable
from mtrain_ui.trackers.background import Background

Point = tuple[str, float, int]
"""Name of a curve, value, update."""
SEND_EVERY_S = 5.0
# A scheduler that asked the job to end kills it soon after.
INTERRUPTED_S = 5.0
"""Seconds that a job which was asked to end waits for a service at most."""


class TrackerOptions(BaseModel):
    """Options of every tracker."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    images: bool = Field(default=True, description="draw predictions at each evaluation, and send the image")
    end_wait_s: float = Field(
        default=30.0, ge=0, description="most seconds that the end of the job waits for what is not sent yet"
    )


class ServiceOptions(TrackerOptions):
    """Options of trackers that keep files too."""

    checkpoints: bool = Field(default=False, description="send each checkpoint, once it is written, as an artefact")
    send_every_s: float = Field(default=SEND_EVERY_S, ge=0, description="seconds between two transfers of the curves")


class Tracker(Reporter, ABC):
    """Base of trackers. Every method whose name begins with ``send_`` or ``open`` is called in a thread, and may be slow."""

    def __init__(self, options: Any, run: ReportedRun) -> None:
        super().__init__(options, run)
        self.draws_images = bool(options.images)
        self._sends_checkpoints = bool(getattr(options, "checkpoints", False))
        self._every_s = float(getattr(options, "send_every_s", SEND_EVERY_S))
        self._points: list[Point] = []
        self._sent_at = time.monotonic()
        self._saved: tuple[Path, int] | None = None
        self._background: Background | None = None

    @abstractmethod
    def open(self) -> None:
        """Make the tracked run, or go on with that of the run folder, and send the parameters."""

    @abstractmethod
    def send_points(self, points: Sequence[Point]) -> None:
        """Send points of curves; all are finite."""

    @abstractmethod
    def send_image(self, name: str, content: bytes, update: int) -> None:
        """Send an image, given as the content of its file."""

    def send_checkpoint(self, folder: Path, update: int) -> None:
        """Send the files of a checkpoint; by default a service has no place for them."""

    @abstractmethod
    def send_end(self, reason: str, error: str) -> None:
        """End the tracked run. ``reason``: done, interrupted, failed."""

    def is_down(self, error: Exception) -> bool:
        """Return whether ``error`` says that the service cannot be reached now, and the call is worth another try."""
        return isinstance(error, OSError)

    # ------------------------------------------------------------------------------------------------ the records
    def start(self, record: Record) -> None:
        """Begin to send."""
        self._service()

    def update(self, record: Record) -> None:
        """Keep the points of an update, and send all that are kept when it is time."""
        self._keep(points(record), int(record["update"]))
        if time.monotonic() - self._sent_at >= self._every_s:
            self._flush()

    def evaluation(self, record: Record) -> None:
        """Send the metrics, the image, and the points that are kept."""
        update = int(record["update"])
        self._keep(points(record), update)
        self._flush()
        if self.draws_images:
            for name in record.get("images", ()):
                # Read now, because the next evaluation replaces the file.
                content = (self.run.folder / name).read_bytes()
                self._add(partial(self.send_image, Path(name).stem, content, update))

    def image(self, record: Record) -> None:
        """Send a picture that a script has made."""
        content = (self.run.folder / str(record["file"])).read_bytes()
        self._add(partial(self.send_image, str(record["name"]), content, int(record["update"])))

    def checkpoint(self, record: Record) -> None:
        """Note the checkpoint, which is complete when the next one begins or the job ends."""
        saved = (folder_of(Path(record["folder"]), int(record["update"])), int(record["update"]))
        if self._sends_checkpoints and saved != self._saved:  # The last update may be saved twice.
            self._send_saved()
            self._saved = saved

    def end(self, record: Record) -> None:
        """Send what is left, and end the tracked run."""
        self._send_saved()
        self._flush()
        self._add(partial(self.send_end, str(record.get("reason")), scrub(str(record.get("error", "")))))
        longest_s = INTERRUPTED_S if record.get("reason") == "interrupted" else float("inf")
        wait_s = min(self.options.end_wait_s, longest_s)
        missing = self._service().close(wait_s)
        self._check()
        if missing:
            raise PluginError(f"{missing} of its transfers were not done {wait_s:g} s after the end (end_wait_s)")

    def failure(self, record: Record) -> None:
        """As at any other end."""
        self.end(record)

    def _service(self) -> Background:
        if self._background is None:
            self._background = Background(self.open, is_down=self.is_down)
        return self._background

    def _add(self, call: Any) -> None:
        self._service().add(call)
        self._check()

    def _check(self) -> None:
        """Report trouble of the thread.

        Raises:
            PluginError: the service refuses the tracked run, so nothing can be sent.
        """
        service = self._service()
        if service.refused is not None:
            raise PluginError(f"its service refuses the run: {service.refused}") from service.refused
        self.trouble = self.trouble or service.take_sentence()

    def _keep(self, values: Mapping[str, Any], update: int) -> None:
        """Keep numbers until they are sent; others are left out, and those that are not finite, which services refuse."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._points += [(name, float(value), update) for name, value in numbers.items() if math.isfinite(value)]

    def _flush(self) -> None:
        points, self._points = self._points, []
        self._sent_at = time.monotonic()
        if points:
            self._add(partial(self.send_points, points))
        else:
            self._check()

    def _send_saved(self) -> None:
        if self._saved is not None:
            self._add(partial(self._send_if_there, *self._saved))
            self._saved = None

    def _send_if_there(self, folder: Path, update: int) -> None:
        """Send a checkpoint, unless ``checkpoint.keep_last`` has removed it in the meantime."""
        if folder.is_dir():
            self.send_checkpoint(folder, update)


def import_library(name: str, make: Callable[[Any], Any] = lambda library: library) -> Any:
    """Return the library of a tracker, which is called as the reporter is, or what ``make`` makes of it.

    Raises:
        PluginError: it is not installed, or a package that it needs for that.
    """
    try:
        return make(import_module(name))
    except ModuleNotFoundError as error:
        remedy = f"install it with: {remedies.install(f'mtrain-ui[{name}]')}"
        raise PluginError(f"report.reporters.{name}: the package {error.name} is not installed; {remedy}") from error


def parameters(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, value as text) for every value of a spec that a service may know: no hosts, paths or keys."""
    yield from _flat(shareable(values), "")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        path = prefix + name
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value if isinstance(value, str) else json.dumps(value)
