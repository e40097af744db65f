"""The interface of a reporter, which receives the records of a job and changes nothing about it.

A reporter is a plugin of the group ``mtrain.reporters``, or what a user names in its place: a class or function of a file
in a spec, an object in a script. It never receives the model, the optimizer or the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtrain.core.interfaces.tensors import Array
from mtrain.spec.section import PluginOptions

Record = Mapping[str, Any]
"""One record of a job as plain values: numbers, text, lists and mappings. Its ``kind`` and ``time`` (seconds since 1970)
are always there; the other keys are those of the line in ``metrics.jsonl``. Numbers may be inf or nan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """The facts about a job that a reporter knows when it is made."""

    folder: Path
    """The run folder. A reporter may write files of its own there."""
    rank: int
    """Number of the rank that the reporter is on."""
    size: int
    """Number of ranks of the job."""
    start_update: int
    """The first update of this process: 0, or the one from which the job is resumed."""
    spec: Mapping[str, Any]
    """The spec as plain values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedUpdate:
    """One update as ``Reporter.inspect`` sees it: copies in host memory, whole on every backend, which cannot be written to."""

    update: int
    """Number of the update in the job, from 0."""
    trained: Sequence[str]
    """Names of the trained parameters, in the order of the recipe's groups."""
    before: Mapping[str, Array]
    """Weights and buffers before the update, by neutral name."""
    after: Mapping[str, Array]
    """Weights and buffers after it; equal to ``before`` where the update was skipped."""
    average: Mapping[str, Array]
    """Averaged weights after it; empty without an average."""
    moments: Mapping[str, Array]
    """State of the update rule after it, named ``<moment>/<parameter>``."""


class Reporter:
    """Base class of reporters. Every method has a default that does nothing.

    Methods are called between two updates, so the job waits for them. A reporter that raises an exception is switched off,
    with one warning; the job goes on unless ``fatal`` says otherwise.
    """

    class Options(PluginOptions):
        """The options of the plugin, ``report.reporters.NAME`` in a spec."""

    every_rank: ClassVar[bool] = False
    """Whether each rank has one of its own; False: rank 0 alone."""
    shares_records: ClassVar[bool] = False
    """Whether it neither keeps nor changes a record, so that it may be given the one that others of this kind are given."""
    fatal: bool = False
    """Whether an exception of this reporter ends the job."""
    draws_images: bool = False
    """Whether predictions are drawn at each evaluation for this reporter. The record then has ``images``, names of files in
    the run folder, where the task and ``report.plots`` allow it."""
    inspect_every: int | None = None
    """``inspect`` is called after the updates whose number is divisible by this; None: never. Fixed once the reporter is made."""
    trouble: str = ""
    """A sentence that the job's records shall have as a warning. It is taken after the next call, and empty again."""

    def __init__(self, options: Any, run: ReportedRun) -> None:
        self.options = options
        self.run = run

    @classmethod
    def is_on(cls, rank: int) -> bool:
        """Return whether rank number ``rank`` has one of these reporters."""
        return rank == 0 or cls.every_rank

    def start(self, record: Record) -> None:
        """Receive the facts about the training that begins now, or goes on."""

    def update(self, record: Record) -> None:
        """Receive the losses, learning rates and measurements of an update, see ``FinishedUpdate.record``."""

    def inspect(self, update: InspectedUpdate) -> None:
        """Look at an update. All ranks gather their state for it, also if this reporter has been switched off meanwhile."""

    def evaluation(self, record: Record) -> None:
        """Receive the ``metrics`` of an evaluation, after ``update`` updates and ``epoch`` epochs; all ranks have the same."""

    def checkpoint(self, record: Record) -> None:
        """Learn that a checkpoint is being written, after ``update`` updates."""

    def copied(self, record: Record) -> None:
        """Learn that a checkpoint was copied (``name``) to ``checkpoint.copy_to``. A copy that fails is a ``warning``."""

    def image(self, record: Record) -> None:
        """Learn of a picture that a script has made (``name``), after ``update`` updates: ``file``, a PNG in the run folder."""

    def histogram(self, record: Record) -> None:
        """Receive the ``counts`` of a script's values (``name``) between neighbouring ``edges``, after ``update`` updates."""

    def message(self, record: Record) -> None:
        """Receive a sentence, ``message``, of kind ``note`` or ``warning``."""

    def end(self, record: Record) -> None:
        """Receive the summary of a job that is done, or was asked to end (``reason``: done, interrupted).

        This or ``failure`` is the last call.
        """

    def failure(self, record: Record) -> None:
        """Receive the summary of a job that has failed, with its exception as ``error``. A rank that is killed says nothing."""

    @classmethod
    def write_page(cls, folder: Path) -> Path | None:
        """Write a page about the job of a run folder, which has ended; return its path.

        The process that has started the job asks the reporter ``html`` for it, unless ``report.plots`` is false. An exception
        becomes a warning. The default writes none.
        """
        return None


METHODS: Mapping[str, str] = {
    "start": "start",
    "update": "update",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "copy": "copied",
    "image": "image",
    "histogram": "histogram",
    "note": "message",
    "warning": "message",
    "end": "end",
}
"""Kind of record -> the method of a reporter that receives it; an end whose ``reason`` is ``failed`` is a ``failure``."""
METHOD_NAMES = (*dict.fromkeys(METHODS.values()), "failure", "inspect")


def tell(reporter: Reporter, record: Record) -> None:
    """Call the method of ``reporter`` that receives this kind of record; no method does if the kind is unknown."""
    kind = record.get("kind")
    method = "failure" if kind == "end" and record.get("reason") == "failed" else METHODS.get(str(kind))
    if method is not None:
        getattr(reporter, method)(record)
