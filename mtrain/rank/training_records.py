"""The records of a training on one rank, of a spec and of a script alike: report, checkpoints and their copies."""

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.collective import barrier, broadcast
from mtrain.core.interfaces import Backend, Module, Part, Progress, RankSession, StateStream, Why
from mtrain.core.ranks.straggler import Stragglers
from mtrain.core.state import streams
from mtrain.core.state.digest import digest_of_stream
from mtrain.rank import copying, random_layers
from mtrain.rank.records import checkpoints_of, left_out, places_summary, progress_summary, report_update, text_of
from mtrain.rank.spec import precision
from mtrain.rank.spec.assembly import unused_gpus
from mtrain.records.reporter import Report
from mtrain.spec.model import Spec
from mtrain.system.devices import device_words
from mtrain.system.runfolder import RunFolder, adopt

log = logging.getLogger(__name__)

RESULT_PARTS: tuple[Part, ...] = ("weights", "ema")
"""Parts of the state whose digests are in the summary."""


class TrainingRecords:
    """Rank 0 writes them; every rank must call the same methods."""

    def __init__(
        self, spec: Spec, run_folder: RunFolder, session: RankSession, report: Report, saved: store.Saved | None
    ) -> None:
        """``saved``: the checkpoint that is resumed; None: the training starts anew."""
        self._spec = spec
        self._run_folder = run_folder
        self._session = session
        self._saved = saved
        self.report = report
        self.copies = copying.make_copies(spec, run_folder, session.collective)
        self.checkpoints = checkpoints_of(spec, run_folder, session.collective.rank, self.copies)
        named = spec.report.stragglers and spec.report.trace == "none" and session.collective.size > 1
        self.stragglers = Stragglers(rank=session.collective.rank, size=session.collective.size) if named else None
        """The search for ranks that the others wait for, whose numbers ride in the agreement after each update; None: it is off."""
        self._device = session.device
        """Description of this rank's device; once ``start`` was called, of all ranks' devices."""

    def start(self, backend: Backend, *, resume: Path | None, fields: Mapping[str, Any]) -> None:
        """Write the first record, which says what is about to be trained, with further ``fields``; every rank must call."""
        collective = self._session.collective
        places = collective.all_gather((self._session.device, socket.gethostname()))
        self._device = device_words([device for device, _ in places])
        if self.stragglers is not None:
            self.stragglers.hosts = [host for _, host in places]
        if self._saved is not None:
            barrier(collective)  # every rank has restored the checkpoint
            if collective.rank == 0:
                adopt(self._run_folder)
        progress = Progress() if self._saved is None else self._saved.progress
        self.report.event(
            "start",
            update=progress.update,
            epoch=progress.epoch,
            ranks=collective.size,
            device=self._device,
            backend=self._spec.backend.name,
            resumed_from=text_of(resume),
            **fields,
        )
        if unused := unused_gpus(self._spec, backend, self._session, os.environ):
            self.report.event("warning", message=unused)

    def report_changes(self, spec: Spec, *, shards: int) -> None:
        """Warn of what goes on otherwise than before the checkpoint that is resumed.

        ``shards``: number of parts of an update that draw random numbers of their own.
        """
        if self._saved is None:
            return
        warnings = (
            precision.changed_since(self._saved.spec, spec),
            random_layers.changed_since(self._saved.meta["extra"], shards),
        )
        for warning in filter(None, warnings):
            self.report.event("warning", message=warning)

    def updated(self, record: Mapping[str, Any]) -> None:
        """Report an update, and the ranks that the others wait for; every rank must call, after the same updates."""
        look = None if self.stragglers is None else self.stragglers.updated(record)
        fields: dict[str, Any] = {}
        if self.stragglers is not None and self.stragglers.slow:
            fields["stragglers"] = list(self.stragglers.slow)
        if look is not None and look.sent_bytes is not None:
            fields["sent_bytes_per_update"] = round(look.sent_bytes)
        report_update(self.report, {**record, **fields})
        if look is not None and look.sentence:
            self.report.event("warning" if look.slow else "note", message=f"update {record['update']}: {look.sentence}")

    def evaluated(self) -> None:
        """Leave the waits since the last update out of the search for stragglers: ranks wait for each other to evaluate, too."""
        if self.stragglers is not None:
            self.stragglers.exclude()

    def check(self) -> None:
        """Notice a failed background save before the next save does, and report copies.

        Raises:
            TrainingError: A background save has failed.
        """
        self.checkpoints.check()
        copying.report(self.copies, self.report)

    def stream(self, *stepped: tuple[str, Module, Any]) -> StateStream:
        """Return a stream of the state that ``save`` may read while training goes on; every rank must call.

        ``stepped``: model and optimizer as ``RankSession.prepare`` returned them, with the name of the model; a single one has
        none.
        """
        # Earlier copies are dropped before new ones are made.
        self.checkpoints.wait()
        copied = self._spec.checkpoint.asynchronous
        return streams.of_models(self._session, stepped, copied=copied)

    def save(
        self,
        state: StateStream,
        progress: Progress,
        *,
        score: float | None,
        why: Why,
        content: Mapping[str, Any],
        names: Sequence[str] = (),
    ) -> None:
        """Write a checkpoint in the background; ``content``: its ``spec`` and ``extra``; ``names``: see ``keep_next``."""
        self.evaluated()
        self.checkpoints.keep_next(names)
        self.checkpoints.save(state, progress, score=score, **content)
        folder = str(self._run_folder.checkpoints)
        kept = {"names": list(names)} if names else {}
        self.report.event("checkpoint", update=progress.update, folder=folder, score=score, why=why, **kept)

    def settle(self, reason: str, *, stop: Callable[[], bool]) -> None:
        """Wait for the last checkpoint and its copy; every rank must call, unless ``reason`` is "failed"."""
        try:
            self.checkpoints.wait()
        except Exception:
            if reason != "failed":
                raise
            log.exception("a checkpoint could not be written")
        if reason != "failed":
            # A job that is ending was asked to; a second request then ends its processes.
            stop = (lambda: False) if reason == "interrupted" else stop
            copying.settle(self._spec, self.copies, self._session.collective, self.report, stop=stop)
        self.copies.close()

    def summary(
        self, reason: str, progress: Progress, *, total_updates: int | None, not_done: Sequence[str]
    ) -> dict[str, Any]:
        """Return what the summaries of all trainings have; ``not_done``: see ``left_out``."""
        job = progress_summary(
            reason,
            progress,
            run=self._run_folder.path,
            backend=self._spec.backend.name,
            session=self._session,
            total_updates=total_updates,
        )
        return {**job, "device": self._device, **left_out(reason, not_done), **self.copies.summary()}

    def result(self, *stepped: tuple[str, Module, Any]) -> dict[str, Any]:
        """Return what the summary of a training that is done has in addition; every rank must call. See ``stream``."""
        state = streams.of_models(self._session, stepped, copied=False)
        digests = {f"{part}_sha256": digest_of_stream(state, part) for part in RESULT_PARTS}
        return broadcast(self._session.collective, digests) | places_summary(self.checkpoints)

    def end(self, reason: str, summary: Mapping[str, Any], **fields: Any) -> None:
        """Write the last record, with further ``fields``, and the summary; unless ``reason`` is "failed", every rank must call."""
        self.report.event("end", **summary, **fields)
        self.report.close(summary)
        if reason == "interrupted":
            # When one rank ends, launchers soon end the others, and rank 0 must have written everything by then.
            barrier(self._session.collective)
